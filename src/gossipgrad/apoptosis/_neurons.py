"""Neurons that may be removed together: producers, layers between, and consumers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from gossipgrad.apoptosis._activations import check_activation
from gossipgrad.comm import is_sharded

__all__ = [
    "Neurons",
    "bias_of",
    "block_of",
    "is_depthwise",
    "is_layer",
    "taps_of",
    "weight_of",
    "width_of",
]


@dataclass(frozen=True)
class Neurons:
    """The neurons of a hidden layer, by the names of modules.

    Attributes:
        producers: The linear or convolutional layer whose outputs they are; several if their
            outputs are multiplied, as in gated perceptrons.
        consumers: The only layers that read them. An operation between must keep channels apart:
            activations, pooling, dropout, flattening.
        companions: Layers between with parameters per neuron: BatchNorm, PReLU, depthwise
            convolutions.
        activation: The only activation between, such as `"relu"`; None if it is unknown, or there
            are several. `bound="worst-case"` needs it.
        norms: By the name of a consumer, the BatchNorm that is the only reader of its output, which
            absorbs a constant if the consumer has no bias.
        dropout: A dropout module directly before the consumers: its inputs are measured instead of
            its outputs. Noise of other dropout between makes neurons look less similar.

    Example:
        >>> import gossipgrad as gg
        >>> gg.Neurons("0", "2", activation="relu").name
        '0'
    """

    producers: str | Sequence[str]
    consumers: str | Sequence[str]
    companions: str | Sequence[str] = ()
    activation: str | None = None
    norms: dict[str, str] = field(default_factory=dict)
    dropout: str | None = None

    def __post_init__(self) -> None:
        for name in ("producers", "consumers", "companions"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        check_activation(self.activation)
        if not self.producers or not self.consumers:
            raise ValueError(f"neurons need a producer and a consumer, got {self}")

    @property
    def name(self) -> str:
        """The first producer's name."""
        return self.producers[0]

    @property
    def is_plain(self) -> bool:
        """Whether they have one producer and no companions, only an activation."""
        return len(self.producers) == 1 and not self.companions

    def width(self, model: nn.Module) -> int:
        """Return their current number."""
        return width_of(model.get_submodule(self.name))

    def misfit(self, model: nn.Module) -> str | None:
        """Return why they do not fit a model; None if they do."""
        modules = dict(model.named_modules())
        dropout = () if self.dropout is None else (self.dropout,)
        for path in (*self._paths(), *self.norms.values(), *dropout):
            if path not in modules:
                return f"the model has no module {path!r}"
        owners: dict[int, int] = {}
        for module in {id(m): m for m in modules.values()}.values():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        for path in self._paths():
            module = modules[path]
            own = dict(module.named_parameters(recurse=False))
            if is_layer(module) and "weight" not in own:
                return f"{path} is parametrized: its weight is computed anew in each step"
            for name, parameter in own.items():
                if owners[id(parameter)] > 1:
                    return f"{path}.{name} is shared with another layer"
                if is_sharded(parameter):
                    return f"{path}.{name} is sharded"
        for path in (*self.producers, *self.consumers):
            if not is_layer(modules[path]):
                return (
                    f"{path} is {_named(modules[path])}, not a linear or plain convolutional layer"
                )
        widths = {path: width_of(modules[path]) for path in self.producers}
        if len({*widths.values()}) > 1:
            return f"the producers make unlike numbers of neurons: {widths}"
        width = widths[self.name]
        for path in self.companions:
            if _size_of(modules[path]) not in (width, 1):
                return f"{path} is {_named(modules[path])} of another width than {width}"
        for path in self.consumers:
            inputs = weight_of(modules[path]).shape[1]
            if inputs % width or (isinstance(modules[path], _ConvNd) and inputs != width):
                return f"{path} reads {inputs} inputs, no multiple of {width} neurons"
        for path in self.norms.values():
            if not isinstance(modules[path], _BatchNorm):
                return f"{path} is {_named(modules[path])}, no BatchNorm"
        return None

    def absorber(self, model: nn.Module, consumer: str) -> tuple[str, float] | None:
        """Return the bias that absorbs a constant of the consumer's output, and its sign."""
        if bias_of(model.get_submodule(consumer)) is not None:
            return f"{consumer}.bias", 1.0
        norm = self.norms.get(consumer)
        if norm is not None and model.get_submodule(norm).running_mean is not None:
            return f"{norm}.running_mean", -1.0
        return None

    def parameters(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters that change with them."""
        for path in self._paths():
            yield from model.get_submodule(path).parameters(recurse=False)

    def _paths(self) -> tuple[str, ...]:
        return (*self.producers, *self.companions, *self.consumers)


def is_layer(module: nn.Module) -> bool:
    """Whether it mixes all inputs into each output: linear, or a convolution in one group."""
    if isinstance(module, _ConvTransposeNd):
        return False
    return isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1)


def is_depthwise(module: nn.Module) -> bool:
    """Whether it is a convolution that keeps channels apart, one output each."""
    return (
        isinstance(module, _ConvNd)
        and not isinstance(module, _ConvTransposeNd)
        and module.groups == module.in_channels == module.out_channels > 1
    )


def weight_of(layer: nn.Module) -> nn.Parameter:
    """Return its weights, `(outputs, inputs, ...)`."""
    assert isinstance(layer.weight, nn.Parameter)
    return layer.weight


def width_of(layer: nn.Module) -> int:
    """Return a layer's number of outputs."""
    size = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(size, int)
    return size


def bias_of(layer: nn.Module) -> Tensor | None:
    """Return its bias, None if it has none."""
    bias = getattr(layer, "bias", None)
    assert bias is None or isinstance(bias, Tensor)
    return bias


def block_of(consumer: nn.Module, width: int) -> int:
    """Return the number of consecutive inputs of a consumer per neuron."""
    return weight_of(consumer).shape[1] // width


def taps_of(consumer: nn.Module, width: int) -> Tensor:
    """Return a consumer's weights by output, tap (a position of its kernel) and neuron."""
    weight = weight_of(consumer).detach()
    return weight.reshape(weight.shape[0], width, -1).transpose(1, 2)


def _size_of(companion: nn.Module) -> int:
    if isinstance(companion, _BatchNorm):
        return companion.num_features
    if isinstance(companion, nn.PReLU):
        return companion.num_parameters
    return width_of(companion) if is_depthwise(companion) else 0


def _named(module: nn.Module) -> str:
    return f"a {type(module).__name__}"
