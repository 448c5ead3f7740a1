"""A tree of state put together again; never more than plain values, arrays and tensors."""

import base64
import binascii
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._encode import permuted_densely

__all__ = ["decode"]

_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")
}


# What comes of putting together what nobody has taken apart.
_ODD = (
    *(KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError),
    struct.error,
)


def decode(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Put a tree together.

    Args:
        tree: As `encode` made it, and JSON brought it back.
        tensor: Gives the tensor of a name, in memory that is the caller's, contiguous.

    Raises:
        ValueError: The tree is none that `encode` makes, or names a tensor that is not there.
    """
    try:
        return _Walk(tensor).value(tree)
    except _ODD as error:
        raise ValueError(f"it is no tree of state ({type(error).__name__}: {error})") from error


class _Walk:
    """Through one tree; refers to itself nowhere, so that it goes with what it holds."""

    def __init__(self, tensor: Callable[[str], Tensor]) -> None:
        self._tensor = tensor
        self._found: dict[tuple[Any, ...], Tensor] = {}

    def value(self, tree: Any) -> Any:
        if type(tree) is list:
            return [self.value(item) for item in tree]
        if type(tree) is not dict:
            return tree
        tag = next(iter(tree), "")
        if tag[:1] == "$":
            return _TAGS[tag](self, tree)
        return {key: self.value(item) for key, item in tree.items()}

    def pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in pairs]

    def ordered(self, told: dict[str, Any]) -> OrderedDict[Any, Any]:
        ordered = OrderedDict(self.pairs(told["$ordered"]))
        if "metadata" in told:
            ordered._metadata = self.value(told["metadata"])  # pyrefly: ignore[missing-attribute]
        return ordered

    def placed(self, told: dict[str, Any]) -> Tensor:
        name, stride, kind = told["$tensor"], told.get("stride"), told.get("dtype")
        same = (name, *(stride or ()), kind)
        if same not in self._found:
            tensor = self._tensor(name)
            if kind == "complex128":
                tensor = torch.view_as_complex(tensor)
            if stride is not None:
                if not permuted_densely(tuple(tensor.shape), tuple(stride)):
                    raise ValueError(f"tensor {name!r} has no stride {stride}")
                placed = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
                tensor = placed.copy_(tensor)
            if kind is not None:
                if _DTYPES[kind].itemsize != tensor.element_size():
                    raise ValueError(f"tensor {name!r} is of no {kind}")
                tensor = tensor.view(_DTYPES[kind])
            self._found[same] = tensor
        return self._found[same]

    def array(self, tag: str, told: dict[str, Any]) -> Any:
        kind = np.dtype(str(told["dtype"]))
        if kind.hasobject:
            raise ValueError(f"array {told[tag]!r} is of objects")
        return self._tensor(told[tag]).numpy().view(kind).reshape(told["shape"])


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"it is no tree of state ({error})") from error


_TAGS: dict[str, Callable[[_Walk, dict[str, Any]], Any]] = {
    "$int": lambda walk, told: int(told["$int"], 16),
    "$float": lambda walk, told: struct.unpack(">d", bytes.fromhex(told["$float"]))[0],
    "$text": lambda walk, told: _bytes(told["$text"]).decode("utf-8", "surrogatepass"),
    "$bytes": lambda walk, told: _bytes(told["$bytes"]),
    "$bytearray": lambda walk, told: bytearray(_bytes(told["$bytearray"])),
    "$tuple": lambda walk, told: tuple(map(walk.value, told["$tuple"])),
    "$dict": lambda walk, told: dict(walk.pairs(told["$dict"])),
    "$counter": lambda walk, told: Counter(dict(walk.pairs(told["$counter"]))),
    "$ordered": _Walk.ordered,
    "$tensor": _Walk.placed,
    "$array": lambda walk, told: walk.array("$array", told),
    "$scalar": lambda walk, told: walk.array("$scalar", told)[()],
}
