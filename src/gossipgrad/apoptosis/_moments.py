"""Measurements in training: second moments of consumers' inputs, by hooks."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from gossipgrad.apoptosis._neurons import Neurons, output_dim, weight_of

__all__ = ["Moments", "Watch"]

_ROWS = 512, 2048  # used of one batch: at least, at most, between them one for two inputs
_AT_ONCE = 2048  # rows per multiplication
_BLOCK = 1024  # entries whose products with others are kept in one tensor
_SQUARES, _VALUES = "squares", "values"  # of what a norm makes
_FULL = 2048  # neurons times taps, up to which moments between taps are kept


class Moments:
    """Means and second moments of one consumer's inputs, and the variance of its outputs.

    A tap is a position of a consumer's kernel, or of a flattened image: a neuron has one input at
    each. If there are too many, taps are combined, and errors become bounds.

    Args:
        width: Number of neurons.
        taps: Inputs of the consumer per neuron.
        device: Device of the sums.

    Rows that are not finite are left out. The products of each block of rows with the entries from
    it on are kept: half of a symmetric matrix. Sums are in float64, of more than 2,048 entries in
    float32: they have a term for each 2,048 rows, so that the rounding of a hundred is 1e-6.

    Attributes:
        count: Rows used on each rank.
        left_out: Rows of this rank that were not finite.
        ranks: Number of ranks that measured.
        mean: Shape `(taps, width)`.
    """

    def __init__(self, width: int, taps: int, *, device: torch.device | None = None) -> None:
        self.width, self.taps = width, taps
        self.pools = taps > 1 and width * taps > _FULL
        kept = 1 if self.pools else taps
        self.count, self.ranks = 0.0, 1
        self.left_out = 0
        size = kept * width
        self.mean = torch.zeros(kept, width, dtype=torch.float64, device=device)
        self._starts = range(0, size, _BLOCK)
        dtype = torch.float64 if size <= _FULL else torch.float32
        self._blocks = [  # about the mean
            torch.zeros(min(_BLOCK, size - start), size - start, dtype=dtype, device=device)
            for start in self._starts
        ]
        self._outputs = torch.zeros(2, dtype=torch.float64, device=device)
        self._rows: list[Tensor] = []

    @property
    def is_finite(self) -> bool:
        """Whether all sums are finite."""
        return all(bool(block.isfinite().all()) for block in self._blocks)

    def covariance(self) -> Tensor:
        """Return a new tensor of covariances, `(taps, width, taps, width)`."""
        kept, width = self.mean.shape
        full = self._blocks[0].new_empty(kept * width, kept * width)
        for start, block in zip(self._starts, self._blocks, strict=True):
            stop = start + len(block)
            full[start:stop, start:] = block
            full[start:, start:stop] = block.T
        return full.div_(self.count).view(kept, width, kept, width)

    def second_of_sum(self, chosen: Tensor, *, about_mean: bool) -> float:
        """Return the second moment of the sum of chosen neurons, which have one tap."""
        covariance, mean = self.covariance()[0, :, 0].cpu(), float(self.mean[0, chosen].sum())
        return float(covariance[chosen][:, chosen].sum()) + (0.0 if about_mean else mean**2)

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
        rows -= mean
        delta = mean.double() - self.mean.flatten()
        total = self.count + count
        for start, block in zip(self._starts, self._blocks, strict=True):
            block += rows[:, start : start + len(block)].T @ rows[:, start:]
        self._add_outer(delta, self.count * count / total)
        self.mean += (count / total * delta).view_as(self.mean)
        self.count = total

    def _add_outer(self, vector: Tensor, weight: float) -> None:
        vector = vector.to(self._blocks[0].dtype)
        for start, block in zip(self._starts, self._blocks, strict=True):
            block.addr_(vector[start : start + len(block)], vector[start:], alpha=weight)

    def add_outputs(self, rows: Tensor) -> None:
        """Add outputs of the consumer, `(rows, outputs)`."""
        total = rows.detach().float().var(0, unbiased=False).sum().double()
        if not total.isfinite():
            return
        self._outputs += torch.stack([torch.ones_like(total), total])

    def tensors(self) -> list[Tensor]:
        """Return the tensors to average over ranks before `use`, which it needs next."""
        mean = self.mean.flatten()
        self._add_outer(mean, self.count)  # about zero, sums of ranks can be averaged
        self._sums = torch.cat([mean.new_tensor([self.count]), self.count * mean])
        return [self._sums, self._outputs, *self._blocks]

    def use(self, ranks: int) -> None:
        """Take the means over ranks of `tensors`, which were averaged in place."""
        self.ranks, self.count = ranks, float(self._sums[0])
        self.mean = (self._sums[1:] / max(1.0, self.count)).view_as(self.mean)
        self._add_outer(self.mean.flatten(), -self.count)


class Watch:
    """Hooks on the consumers of some neurons that measure training batches, until closed."""

    # Compiled code ignores added or removed hooks: opening and closing a watch resets all of it. It
    # is recompiled for other shapes in any case, but a limited number of times.

    def __init__(self, model: nn.Module, neurons: Sequence[Neurons]) -> None:
        self.moments: dict[tuple[str, str], Moments] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._handles: list[RemovableHandle] = []
        layers = [p for n in neurons for p in (*n.producers, *n.consumers, *n.companions)]
        layers = [p for p in dict.fromkeys(layers) if _has_weight(model.get_submodule(p))]
        self.positions = torch.zeros(len(layers), dtype=torch.float64)
        self._layers = layers
        for number, path in enumerate(layers):
            self._count(model.get_submodule(path), number)
        for each in neurons:
            for path in each.row_norms(model):
                self._hook_norm(model, each, path)
            for path in each.consumers:
                consumer = model.get_submodule(path)
                _, held = each.input_of(model, path)
                taps = held.indices.shape[1]
                if isinstance(consumer, _ConvNd) and not consumer.transposed:
                    taps *= consumer.weight[0, 0].numel()
                moments = Moments(each.width, taps, device=weight_of(consumer).device)
                self.moments[each.name, path] = moments
                self._seen[each.name, path] = 0
                self._hook(model, each, path)
        torch.compiler.reset()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.compiler.reset()

    def positions_by_layer(self) -> dict[str, float]:
        """Return how many positions the outputs of layers have had."""
        return dict(zip(self._layers, self.positions.tolist(), strict=True))

    def _count(self, layer: nn.Module, number: int) -> None:
        @torch.compiler.disable
        def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if module is layer and module.training:
                is_transposed = isinstance(module, _ConvNd) and module.transposed
                of, dim = (inputs[0], 0) if is_transposed else (output, output_dim(module))
                self.positions[number] += of.numel() / weight_of(module).shape[dim]

        self._handles.append(layer.register_forward_hook(count))

    def _hook_norm(self, model: nn.Module, neurons: Neurons, path: str) -> None:
        """Measure what a norm makes, without gain and bias: squares, and of LayerNorm values."""
        norm, indices = model.get_submodule(path), neurons.entries[f"{path}.weight 0"].indices
        device = weight_of(norm).device
        is_centred = isinstance(norm, nn.LayerNorm)
        kept = {what: (neurons.name, f"{path} {what}") for what in (_SQUARES, _VALUES)}
        for key in [*kept.values()][: 1 + is_centred]:
            self.moments[key] = Moments(neurons.width, 1, device=device)

        @torch.compiler.disable
        @torch.no_grad()
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if module is norm and module.training:
                x = inputs[0].flatten(0, -2)
                rows = x[:: -(-len(x) // _most_rows(neurons.width))]
                rows = rows[:, indices[:, 0].to(device)].float()
                if is_centred:
                    rows = rows - rows.mean(1, keepdim=True)
                rows = rows / (rows.square().mean(1, keepdim=True) + 1e-30).sqrt()
                self.moments[kept[_SQUARES]].add(rows.square().unsqueeze(1))
                if is_centred:
                    self.moments[kept[_VALUES]].add(rows.unsqueeze(1))

        self._handles.append(norm.register_forward_hook(add))

    def _hook(self, model: nn.Module, neurons: Neurons, path: str) -> None:
        key, consumer = (neurons.name, path), model.get_submodule(path)
        entries = neurons.input_of(model, path)[1].indices
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
            rows, made = _rows_of(module, x, output, entries.to(x.device), seed=seen)
            moments.add(rows)
            moments.add_outputs(made)
            self._seen[key] = seen + 1

        self._handles.append(consumer.register_forward_hook(look))
        if neurons.dropout is not None:
            dropout = model.get_submodule(neurons.dropout)
            self._handles.append(dropout.register_forward_pre_hook(keep))


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter)


def _rows_of(
    consumer: nn.Module, x: Tensor, output: Tensor, entries: Tensor, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Return a sample of a consumer's inputs, `(rows, taps, width)`, and of its outputs."""
    if isinstance(consumer, _ConvNd) and not consumer.transposed:
        return _patches_of(consumer, x, output, entries, seed=seed)
    if isinstance(consumer, _ConvNd):  # each position of its input is a row
        rank = consumer.weight.ndim - 2
        x, output = (each.movedim(-1 - rank, -1) for each in (x, output))
    x, made, most = x.flatten(0, -2), output.flatten(0, -2), _most_rows(entries.numel())
    stride, of_outputs = -(-len(x) // most), -(-len(made) // most)
    rows = x[seed % stride :: stride][:, entries.flatten()]
    return rows.unflatten(1, entries.shape).transpose(1, 2), made[seed % of_outputs :: of_outputs]


def _most_rows(inputs: int) -> int:
    return min(max(_ROWS[0], inputs // 2), _ROWS[1])


def _patches_of(
    consumer: _ConvNd, x: Tensor, output: Tensor, entries: Tensor, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Return what a convolution reads at some positions of its output, and makes there."""
    rank = consumer.weight.ndim - 2
    x = x.reshape(-1, *x.shape[-rank - 1 :])
    output = output.reshape(-1, *output.shape[-rank - 1 :])
    mode = "constant" if consumer.padding_mode == "zeros" else consumer.padding_mode
    x = F.pad(x, consumer._reversed_padding_repeated_twice, mode=mode)
    generator = torch.Generator().manual_seed(seed)
    positions = list(product(*(range(size) for size in output.shape[2:])))
    most = _most_rows(entries.numel() * consumer.weight[0, 0].numel())
    chosen = torch.randperm(len(positions), generator=generator)[: -(-most // len(x))]
    patches, made = [], []
    for index in chosen.tolist():
        window, of = x, output
        for dim, at in enumerate(positions[index]):
            stride, dilation = consumer.stride[dim], consumer.dilation[dim]
            start = at * stride
            stop = start + dilation * (consumer.kernel_size[dim] - 1) + 1
            taken = torch.arange(start, stop, dilation, device=x.device)
            window = window.index_select(2 + dim, taken)
            of = of.narrow(2 + dim, at, 1)
        taps = window.flatten(2)[:, entries.flatten()].unflatten(1, entries.shape)
        patches.append(taps.flatten(2).transpose(1, 2))
        made.append(of.flatten(1))
    return torch.cat(patches), torch.cat(made)
