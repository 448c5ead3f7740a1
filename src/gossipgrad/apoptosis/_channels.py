"""The position of a layer's neurons in a tensor, through torch's functions."""

from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = [
    "DROPOUTS",
    "ELEMENTWISE",
    "HARMLESS",
    "NEUTRAL",
    "RESHAPES",
    "SUMS",
    "Channels",
    "behind",
]

ELEMENTWISE = {
    *("relu", "relu6", "leaky_relu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("sigmoid", "tanh", "hardtanh", "hardsigmoid", "hardswish", "softplus", "softsign"),
    *("logsigmoid", "tanhshrink", "softshrink", "hardshrink", "threshold", "abs", "square", "exp"),
    *("sqrt", "rsqrt", "erf", "sin", "cos", "pow", "clamp", "clip", "neg", "prelu"),
}
NEUTRAL = {
    *("contiguous", "to", "float", "double", "half", "bfloat16", "type", "cpu", "cuda", "clone"),
    *("detach", "alias", "identity", "requires_grad", "type_as", "nan_to_num"),
}
DROPOUTS = {"dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
DROPOUTS |= {"feature_dropout", "feature_alpha_dropout"}
RESHAPES = {"flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten"}
SUMS = {"add", "sub", "rsub", "mul", "multiply", "div", "truediv", "divide", "true_divide"}
_REDUCTIONS = {"mean", "sum", "amax", "amin"}
HARMLESS = {"get", "size", "dim", "ndimension", "numel", "element_size", "stride", "len", "hash"}
HARMLESS |= {"is_contiguous", "is_floating_point", "is_complex", "data_ptr", "get_device", "repr"}
_POOL = ("pool1d", "pool2d", "pool3d")


@dataclass(frozen=True, slots=True)
class Channels:
    """The position of a layer's neurons in a tensor: `block` elements each, along `dim`."""

    layer: str
    dim: int
    block: int = 1


def behind(
    name: str,
    channels: Channels,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shape: tuple[int, ...],
    after: tuple[int, ...],
) -> Channels | str:
    """Return the channels after a function of one tensor, or why they cannot be followed."""
    if name in ELEMENTWISE or name in NEUTRAL or name in DROPOUTS:
        return channels
    if name.startswith(("max_", "avg_", "adaptive_", "lp_")) and name.endswith(_POOL):
        is_apart = channels.dim == len(shape) - int(name[-2]) - 1 and channels.block == 1
        return channels if is_apart else f"{name}() pools over them"
    if name == "pad" and channels.dim < len(shape) - len(args[1]) // 2:
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        return channels if mode != "constant" else "pad() sets constants beside them"
    if name in _REDUCTIONS:
        return _reduced(name, channels, args, kwargs, len(shape))
    if name in RESHAPES:
        return _reshaped(name, channels, shape, after)
    if name in ("permute", "transpose", "swapaxes"):
        return _permuted(name, channels, args, kwargs, len(shape))
    return f"they reach {name}(), which may mix them"


def _reduced(
    name: str, channels: Channels, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int
) -> Channels | str:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    dims = [dim % rank for dim in dims]
    if channels.dim in dims:
        return f"{name}() reduces over them"
    before = 0 if keeps else sum(dim < channels.dim for dim in dims)
    return Channels(channels.layer, channels.dim - before, channels.block)


def _reshaped(
    name: str, channels: Channels, shape: tuple[int, ...], after: tuple[int, ...]
) -> Channels | str:
    before, size = prod(shape[: channels.dim]), shape[channels.dim]
    for dim in range(len(after)):
        if prod(after[:dim]) != before or after[dim] < size or after[dim] % size:
            continue
        merged = after[dim] // size
        if merged in [prod(shape[channels.dim + 1 : end]) for end in range(channels.dim + 1, 9)]:
            return Channels(channels.layer, dim, channels.block * merged)
    return f"{name}() takes them apart"


def _permuted(
    name: str, channels: Channels, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int
) -> Channels | str:
    if kwargs:
        return f"they reach {name}() with named dimensions"
    dims = args[1] if len(args) == 2 else args[1:]
    dims = [d % rank for d in dims]
    order = list(range(rank))
    if name == "permute":
        order = dims
    else:
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return Channels(channels.layer, order.index(channels.dim), channels.block)
