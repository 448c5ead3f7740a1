"""Measurements in training: second moments of consumers' inputs, by hooks."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from gossipgrad.apoptosis._neurons import Neurons, block_of, weight_of

__all__ = ["Moments", "Watch"]

_ROWS = 2048  # used of one batch
_AT_ONCE = 2048  # rows per multiplication
_POWER = 32  # of a norm that equals the maximum up to a factor of ranks ** (1 / 32)
_FULL = 2048  # neurons times taps, up to which moments between taps are kept


class Moments:
    """Means and second moments of one consumer's inputs, and the variance of its outputs.

    A tap is a position of a consumer's kernel, or of a flattened image: a neuron has one input at
    each. If there are too many, taps are combined, and errors become bounds.

    Args:
        width: Number of neurons.
        taps: Inputs of the consumer per neuron.
        inputs: Number of the producer's inputs, if their range is measured; otherwise 0.
        device: Device of the sums, in float64.

    Rows that are not finite are left out.

    Attributes:
        count: Rows used on each rank.
        left_out: Rows of this rank that were not finite.
        ranks: Number of ranks that measured.
        mean: Shape `(taps, width)`.
        scatter: Sums of products about the mean, `(taps, width, taps, width)`.
        norm: The largest norm of the producer's inputs, with 1 for its bias.
        low: The minimum of each of the producer's inputs, and of 0.
        high: The maximum, likewise.
    """

    def __init__(
        self, width: int, taps: int, *, device: torch.device | None = None, inputs: int = 0
    ) -> None:
        self.width, self.taps = width, taps
        self.pools = taps > 1 and width * taps > _FULL
        kept = 1 if self.pools else taps
        self.count, self.ranks = 0.0, 1
        self.left_out = 0
        self.mean = torch.zeros(kept, width, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(kept, width, kept, width, dtype=torch.float64, device=device)
        self._outputs = torch.zeros(2, dtype=torch.float64, device=device)
        self._rows: list[Tensor] = []
        self.norm = 1.0
        self.low = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.high = torch.zeros(inputs, dtype=torch.float64, device=device)

    @property
    def output_variance(self) -> float:
        """Variance of the consumer's outputs, summed over outputs."""
        count, total = self._outputs.tolist()
        return total / count if count else 0.0

    def add(self, rows: Tensor) -> None:
        """Add rows of shape `(rows, taps, width)`; call `flush` before reading moments."""
        if self.pools:
            rows = rows.reshape(-1, 1, self.width)
        rows = rows.detach().flatten(1)
        rows = rows.clone() if rows.dtype is torch.float64 else rows.to(torch.float32, copy=True)
        finite = rows.isfinite().all(1)
        if not finite.all():
            self.left_out += len(rows) - int(finite.sum())
            rows = rows[finite]
        self._rows.append(rows)
        if sum(map(len, self._rows)) >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Add waiting rows to the moments: many together cost much less than each batch."""
        rows = torch.cat(self._rows) if self._rows else torch.empty(0)
        self._rows = []
        if not len(rows):
            return
        count, mean = len(rows), rows.mean(0)
        centred = rows - mean
        scatter = (centred.T @ centred).double()
        delta = mean.double() - self.mean.flatten()
        total = self.count + count
        scatter.addr_(delta, delta, alpha=self.count * count / total)
        self.scatter += scatter.view_as(self.scatter)
        self.mean += (count / total * delta).view_as(self.mean)
        self.count = total

    def add_outputs(self, rows: Tensor) -> None:
        """Add outputs of the consumer, `(rows, outputs)`."""
        total = rows.detach().float().var(0, unbiased=False).sum().double()
        if not total.isfinite():
            return
        self._outputs += torch.stack([torch.ones_like(total), total])

    def tensors(self) -> list[Tensor]:
        """Return the tensors to average over ranks before `use`."""
        mean = self.mean.flatten()
        about_zero = self.scatter.flatten(2).flatten(0, 1) + self.count * torch.outer(mean, mean)
        row, column = torch.triu_indices(*about_zero.shape, device=mean.device)
        count = mean.new_tensor([self.count])
        ends = torch.cat([mean.new_tensor([self.norm]), -self.low, self.high])
        return [
            *(count, self.count * mean, about_zero[row, column], self._outputs.clone()),
            ends.clamp(min=1e-6).pow(_POWER),  # their mean over ranks approximates the maximum
        ]

    def use(self, tensors: Sequence[Tensor], ranks: int) -> None:
        """Load the means over ranks of the result of `tensors`."""
        count, total, triangle, self._outputs, ends = tensors
        self.ranks = ranks
        ends = (ranks * ends).pow(1 / _POWER)
        self.norm = float(ends[0])
        low, self.high = ends[1:].chunk(2) if len(ends) > 1 else (ends[1:], ends[1:])
        self.low = -low
        self.count = float(count)
        mean = total / count
        self.mean = mean.view_as(self.mean)
        about_zero = mean.new_empty(len(mean), len(mean))
        row, column = torch.triu_indices(*about_zero.shape, device=mean.device)
        about_zero[row, column] = about_zero[column, row] = triangle
        self.scatter = (about_zero - count * torch.outer(mean, mean)).view_as(self.scatter)


class Watch:
    """Hooks on the consumers of some neurons that measure training batches, until closed."""

    # Compiled code ignores added or removed hooks: opening and closing a watch resets all of it. It
    # is recompiled for other shapes in any case, but a limited number of times.

    def __init__(self, model: nn.Module, neurons: Sequence[Neurons], *, bounds: bool) -> None:
        self.moments: dict[tuple[str, str], Moments] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._handles: list[RemovableHandle] = []
        for each in neurons:
            width = each.width(model)
            for path in each.consumers:
                consumer = model.get_submodule(path)
                taps = block_of(consumer, width)
                if isinstance(consumer, _ConvNd):
                    taps = consumer.weight[0, 0].numel()
                looks = bounds and path == each.consumers[0]
                inputs = weight_of(model.get_submodule(each.name)).shape[1] if looks else 0
                moments = Moments(width, taps, device=weight_of(consumer).device, inputs=inputs)
                self.moments[each.name, path] = moments
                self._seen[each.name, path] = 0
                self._hook(model, each, path)
            if bounds:
                first = self.moments[each.name, each.consumers[0]]
                self._hook_inputs(model.get_submodule(each.name), first)
        torch.compiler.reset()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.compiler.reset()

    def _hook(self, model: nn.Module, neurons: Neurons, path: str) -> None:
        key, consumer = (neurons.name, path), model.get_submodule(path)
        undropped: list[Tensor] = []

        @torch.compiler.disable
        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            undropped[:] = [inputs[0].detach()]

        @torch.compiler.disable
        @torch.no_grad()
        def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if module is not consumer or not module.training or not inputs[0].numel():
                return  # a copied model has copies of the hooks
            seen, moments = self._seen[key], self.moments[key]
            x = undropped.pop() if undropped else inputs[0]
            rows, made = _rows_of(module, x, output, moments, seed=seen)
            moments.add(rows)
            moments.add_outputs(made)
            self._seen[key] = seen + 1

        self._handles.append(consumer.register_forward_hook(look))
        if neurons.dropout is not None:
            dropout = model.get_submodule(neurons.dropout)
            self._handles.append(dropout.register_forward_pre_hook(keep))

    def _hook_inputs(self, producer: nn.Module, moments: Moments) -> None:
        @torch.compiler.disable
        @torch.no_grad()
        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module is not producer or not module.training or not inputs[0].numel():
                return
            x = inputs[0].detach().double()
            taps = 1
            if isinstance(module, _ConvNd):
                taps = module.weight[0, 0].numel()
                x = x.movedim(-(module.weight.ndim - 1), -1)
            x = x.flatten(0, -2)
            x = x[x.isfinite().all(1)]
            if not len(x):
                return
            largest = taps * float(x.square().sum(1).max()) + 1
            moments.norm = max(moments.norm, largest**0.5)
            moments.low = torch.minimum(moments.low, x.amin(0))
            moments.high = torch.maximum(moments.high, x.amax(0))

        self._handles.append(producer.register_forward_pre_hook(look))


def _rows_of(
    consumer: nn.Module, x: Tensor, output: Tensor, moments: Moments, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Return a sample of a consumer's inputs, `(rows, taps, width)`, and of its outputs."""
    width = moments.width
    if not isinstance(consumer, _ConvNd):
        made = output.reshape(-1, output.shape[-1])
        x = x.reshape(len(made), width, moments.taps).transpose(1, 2)
        stride = -(-len(made) // _ROWS)
        return x[seed % stride :: stride], made[seed % stride :: stride]
    rank = consumer.weight.ndim - 2
    x = x.reshape(-1, *x.shape[-rank - 1 :])
    output = output.reshape(-1, *output.shape[-rank - 1 :])
    mode = "constant" if consumer.padding_mode == "zeros" else consumer.padding_mode
    x = F.pad(x, consumer._reversed_padding_repeated_twice, mode=mode)
    generator = torch.Generator().manual_seed(seed)
    places = list(product(*(range(size) for size in output.shape[2:])))
    chosen = torch.randperm(len(places), generator=generator)[: max(1, _ROWS // len(x))]
    patches, made = [], []
    for index in chosen.tolist():
        window, of = x, output
        for dim, at in enumerate(places[index]):
            stride, dilation = consumer.stride[dim], consumer.dilation[dim]
            start = at * stride
            stop = start + dilation * (consumer.kernel_size[dim] - 1) + 1
            taken = torch.arange(start, stop, dilation, device=x.device)
            window = window.index_select(2 + dim, taken)
            of = of.narrow(2 + dim, at, 1)
        patches.append(window.flatten(2).transpose(1, 2))
        made.append(of.flatten(1))
    return torch.cat(patches), torch.cat(made)
