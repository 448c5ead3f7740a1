"""Neurons that may be removed: their entries in parameters and buffers, and what reads them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

__all__ = [
    "Entries",
    "Neurons",
    "bias_of",
    "input_dim",
    "is_layer",
    "is_row_norm",
    "output_dim",
    "taps_of",
    "tensor_of",
    "weight_of",
]


@dataclass(frozen=True)
class Entries:
    """The entries of neurons in one dimension of a parameter or buffer.

    Attributes:
        size: The size of the dimension.
        indices: Those of each neuron, `(neurons, indices of one)`.
    """

    size: int
    indices: Tensor


@dataclass(frozen=True)
class Neurons:
    """The neurons of a hidden layer, by the names of modules.

    A neuron is what can go alone: an output of a layer, a pair of gate and value, a channel of a
    residual stream, a head of attention, or a group of a grouped convolution.

    Attributes:
        producers: The layers whose outputs they are.
        consumers: The only layers that read them. An operation between must keep them apart:
            activations, pooling, dropout, flattening.
        companions: Layers between with parameters per neuron: BatchNorm, PReLU, convolutions in
            groups.
        norms: By the name of a consumer, the BatchNorm that is the only reader of its output, which
            absorbs a constant if the consumer has no bias.
        dropout: A dropout module directly before the only consumer: its inputs are measured instead
            of its outputs. Noise of other dropout between makes neurons look less similar.
        entries: By the name of a parameter or buffer and dimension (`"up.weight 0"`), their
            entries; `shrink()` fills it in where it is empty.
        part: Which of several kinds of neurons it is that the first producer makes.

    Example:
        >>> import gossipgrad as gg
        >>> gg.Neurons("0", "2").name
        '0'
    """

    producers: str | Sequence[str]
    consumers: str | Sequence[str]
    companions: str | Sequence[str] = ()
    norms: dict[str, str] = field(default_factory=dict)
    dropout: str | None = None
    entries: dict[str, Entries] = field(default_factory=dict, repr=False)
    part: int = 0

    def __post_init__(self) -> None:
        for name in ("producers", "consumers", "companions"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if not self.producers or not self.consumers:
            raise ValueError(f"neurons need a producer and a consumer, got {self}")

    @property
    def name(self) -> str:
        """The first producer's name, and which of its kinds of neurons they are."""
        return f"{self.producers[0]}[{self.part}]" if self.part else self.producers[0]

    @property
    def width(self) -> int:
        """Their number."""
        return len(next(iter(self.entries.values())).indices)

    @property
    def outputs(self) -> int:
        """How many outputs of the first producer one of them is."""
        of = (each for key, each in self.entries.items() if _path(key) == self.producers[0])
        return next(of).indices.shape[1]

    def input_of(self, model: nn.Module, consumer: str) -> tuple[int, Entries]:
        """Return the dimension of a consumer's weight that reads them, and their entries of it."""
        dim = input_dim(model.get_submodule(consumer))
        return dim, self.entries[f"{consumer}.weight {dim}"]

    def row_norms(self, model: nn.Module) -> list[str]:
        """Return the norms over them: LayerNorm or RMSNorm of a residual stream."""
        return [path for path in self.companions if is_row_norm(model.get_submodule(path))]

    def located(self, model: nn.Module) -> "Neurons":
        """Return the same with their entries of plain layers, unless it has them."""
        if self.entries:
            return self
        width = weight_of(model.get_submodule(self.producers[0])).shape[0]
        entries = {}
        for path in (*self.producers, *self.companions):
            for name, tensor in _own(model.get_submodule(path)):
                if tensor.ndim and tensor.shape[0] == width:
                    entries[f"{path}.{name} 0"] = Entries(width, torch.arange(width)[:, None])
        for path in self.consumers:
            size = weight_of(model.get_submodule(path)).shape[1]
            indices = torch.arange(size).view(width, -1)
            entries[f"{path}.weight 1"] = Entries(size, indices)
        return replace(self, entries=entries)

    def why_not(self, model: nn.Module) -> str | None:
        """Return why such neurons, named by hand, cannot be removed; None if they can."""
        modules = dict(model.named_modules())
        for path in (*self.producers, *self.consumers, *self.companions, *self.norms.values()):
            if path not in modules:
                return f"the model has no module {path!r}"
        for path in (*self.producers, *self.consumers):
            if not is_layer(modules[path]):
                return f"{path} is a {type(modules[path]).__name__}, no plain layer"
        widths = {path: weight_of(modules[path]).shape[0] for path in self.producers}
        width = widths[self.producers[0]]
        if len({*widths.values()}) > 1:
            return f"the producers make unlike numbers of neurons: {widths}"
        for path in self.consumers:
            inputs = weight_of(modules[path]).shape[1]
            if inputs % width or (isinstance(modules[path], _ConvNd) and inputs != width):
                return f"{path} reads {inputs} inputs, no multiple of {width} neurons"
        return None

    def misfit(self, model: nn.Module) -> str | None:
        """Return why they are not in a model; None if they are."""
        for key, held in self.entries.items():
            name, dim = key.rpartition(" ")[0], int(key.rpartition(" ")[2])
            tensor = tensor_of(model, name)
            if tensor is None:
                return f"it has no {name}"
            size = tensor.shape[dim] if dim < tensor.ndim else 0
            if size != held.size:
                return f"{name} has {size} neurons along dimension {dim}, the plan {held.size}"
        return None

    def after(self, kept: Tensor, stays: Mapping[str, Tensor]) -> "Neurons":
        """Return those that are left, with their entries after a surgery.

        Args:
            kept: Indices of neurons.
            stays: By dimension, its entries that stay; all, if it is not named.
        """
        entries = {}
        for key, held in self.entries.items():
            indices, size = held.indices[kept], held.size
            if key in stays:
                number = torch.zeros(size, dtype=torch.long)
                number[stays[key]] = torch.arange(len(stays[key]))
                indices, size = number[indices], len(stays[key])
            entries[key] = Entries(size, indices)
        return replace(self, entries=entries)

    def absorber(self, model: nn.Module, consumer: str) -> tuple[str, float] | None:
        """Return the bias that absorbs a constant of the consumer's output, and its sign."""
        module = model.get_submodule(consumer)
        if isinstance(module, _ConvTransposeNd):
            return None  # its borders read fewer taps
        if bias_of(module) is not None:
            return f"{consumer}.bias", 1.0
        norm = self.norms.get(consumer)
        found = None if norm is None else model.get_submodule(norm)
        if isinstance(found, _BatchNorm) and found.running_mean is not None:
            return f"{norm}.running_mean", -1.0
        return None

    def parameters(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters that change with them."""
        names = {key.rpartition(" ")[0] for key in self.entries}
        absorbers = [self.absorber(model, path) for path in self.consumers]
        names |= {each[0] for each in absorbers if each is not None}
        yield from (p for name, p in model.named_parameters() if name in names)


def _path(key: str) -> str:
    return key.rpartition(" ")[0].rpartition(".")[0]


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer by its name."""
    path, _, own = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), own)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def is_layer(module: nn.Module) -> bool:
    """Whether it mixes all inputs into each output: linear, or a convolution in one group."""
    if isinstance(module, _ConvTransposeNd):
        return False
    return isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1)


def input_dim(layer: nn.Module) -> int:
    """Return the dimension of its weight that its inputs belong to."""
    is_first = isinstance(layer, _ConvTransposeNd) or hasattr(layer, "nf")  # Conv1D of transformers
    return 0 if is_first else 1


def output_dim(layer: nn.Module) -> int:
    """Return the dimension of its weight that its outputs belong to."""
    is_second = isinstance(layer, _ConvTransposeNd | nn.Embedding) or hasattr(layer, "nf")
    return 1 if is_second else 0


def is_row_norm(module: nn.Module) -> bool:
    """Whether it normalises rows over channels that have a gain each: LayerNorm or RMSNorm."""
    weight = getattr(module, "weight", None)
    is_norm = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")
    return is_norm and isinstance(weight, nn.Parameter) and weight.ndim == 1


def weight_of(layer: nn.Module) -> nn.Parameter:
    """Return its weights."""
    assert isinstance(layer.weight, nn.Parameter)
    return layer.weight


def bias_of(layer: nn.Module) -> Tensor | None:
    """Return its bias, None if it has none."""
    bias = getattr(layer, "bias", None)
    assert bias is None or isinstance(bias, Tensor)
    return bias


def taps_of(consumer: nn.Module, dim: int, held: Entries) -> Tensor:
    """Return a consumer's weights by output, tap and neuron.

    A tap is one of a neuron's inputs: at a position of the kernel, or of several entries. Each
    position of a transposed kernel makes outputs of its own.
    """
    weight = weight_of(consumer).detach().movedim(dim, 1)
    if isinstance(consumer, _ConvTransposeNd):
        positions, strides = weight[0, 0].numel(), torch.tensor(consumer.stride).prod()
        scale = float(positions**0.5 / strides)  # as many of them meet in one output
        weight = scale * weight.flatten(2).movedim(2, 1).flatten(0, 1)
    indices = held.indices.to(weight.device)
    chosen = weight[:, indices.flatten()].unflatten(1, indices.shape)
    return chosen.flatten(2).transpose(1, 2)
