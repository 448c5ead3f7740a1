"""A tree of state taken apart: plain JSON, and tensors by name."""

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["DTYPE_NAMES", "MAX_DEPTH", "Encoded", "encode", "permuted_densely"]

# As safetensors writes them; others are kept as integers of their size, with their type beside.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_DEPTH = 100
# Python refuses to read longer ones in decimal.
_MOST_BITS = 4096
_MAPPINGS = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What is to be written."""

    tree: Any
    """Of what JSON knows; where a tensor was, its name."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Detached, without a copy where they lie in memory as they are; not yet on the CPU."""


def encode(state: object) -> Encoded:
    """Take a tree apart. Plain values are copied, tensors and what they hold are not.

    Raises:
        ValueError: Something in it cannot be written; with its place, its type and the way out.
    """
    walk = _Walk()
    return Encoded(tree=walk.value(state, ()), tensors=walk.tensors)


def permuted_densely(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill a stretch of memory, none twice, in whatever order of dims."""
    filled = 1
    for step, size in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] != 1):
        if step != filled:
            return False
        filled *= size
    return True


class _Walk:
    """Through one tree."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def value(self, value: Any, path: tuple[str | int, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            small = value.bit_length() <= _MOST_BITS
            return value if small else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is str:
            return _text(value)
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
        if len(path) >= MAX_DEPTH:
            raise ValueError(
                f"{_place(path[:3])} nests deeper than {MAX_DEPTH}: a state that holds itself "
                "cannot be written"
            )
        if kind in (list, tuple):
            items = self._items(value, path)
            return items if kind is list else {"$tuple": items}
        if kind in _MAPPINGS:
            return self._mapping(value, path, _MAPPINGS[kind])
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        raise _refusal(value, path)

    def _items(self, items: list[Any] | tuple[Any, ...], path: tuple[str | int, ...]) -> list[Any]:
        kinds = set(map(type, items))
        if kinds == {int} and max(map(int.bit_length, items)) <= _MOST_BITS:
            return list(items)  # long lists of indices, in the time of a copy
        return [self.value(item, (*path, index)) for index, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[Any, Any], path: tuple[str | int, ...], tag: str) -> Any:
        for key in mapping:
            if type(key) not in (str, int):
                raise ValueError(
                    f"{_place(path)} has the key {key!r} of type {type(key).__name__}: keys must "
                    "be of type str or int to be written"
                )
        items = {key: self.value(item, (*path, key)) for key, item in mapping.items()}
        if tag == "$dict" and all(type(k) is str and k[:1] != "$" and _plain(k) for k in items):
            return items
        pairs = [[self.value(key, path), item] for key, item in items.items()]
        # Where modules keep the versions that their `load_state_dict` goes by.
        versions = getattr(mapping, "_metadata", None) if tag == "$ordered" else None
        if versions is None:
            return {tag: pairs}
        return {tag: pairs, "metadata": self.value(versions, (*path, "_metadata"))}

    def _tensor(self, tensor: Tensor, path: tuple[str | int, ...]) -> dict[str, Any]:
        tensor = _plain_tensor(tensor, path)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        # The same memory is written once, and is the same again when read.
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride)
        name = self._names.get(same) if tensor.numel() else None
        if name is None:
            name = self._new_name(path)
            self._names[same] = name
            self.tensors[name] = _carried(tensor)
        told: dict[str, Any] = {"$tensor": name}
        if not tensor.is_contiguous() and permuted_densely(shape, stride):
            told["stride"] = list(stride)
        if tensor.dtype not in DTYPE_NAMES:
            told["dtype"] = str(tensor.dtype).removeprefix("torch.")
        return told

    def _array(self, array: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
        if type(array) is not np.ndarray and not isinstance(array, np.generic):
            raise _refusal(array, path)
        kind = array.dtype
        if kind.hasobject or not kind.itemsize or np.dtype(kind.str) != kind:
            raise ValueError(
                f"{_place(path)} is an array of {kind}, which cannot be written: only arrays of "
                "numbers, of bool, or of text of one length can; split it into several"
            )
        name = self._new_name(path)
        # Copied here, since arrays are few and small.
        self.tensors[name] = torch.from_numpy(np.array(bytearray(array.tobytes())))
        tag = "$array" if isinstance(array, np.ndarray) else "$scalar"
        return {tag: name, "dtype": kind.str, "shape": list(array.shape)}

    def _new_name(self, path: tuple[str | int, ...]) -> str:
        """By the path, for people who open the file; unlike any other."""
        name = "/".join(map(str, path)).encode("ascii", "backslashreplace").decode() or "state"
        found, count = name, 1
        while found in self.tensors or found == "__metadata__":
            count += 1
            found = f"{name}#{count}"
        return found


def _plain_tensor(tensor: Tensor, path: tuple[str | int, ...]) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{_place(path)} is a {type(tensor).__name__}, a kind of tensor that cannot be "
            "written: convert it to a plain torch.Tensor; of a DTensor, each rank writes its own "
            "to_local()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise ValueError(
            f"{_place(path)} is a {what} tensor, which cannot be written: make it dense, by "
            "to_dense(), dequantize() or to_padded_tensor()"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{_place(path)} is on the meta device and holds no values: give the model memory "
            "first, by to_empty() and an initialisation"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _carried(tensor: Tensor) -> Tensor:
    """The same memory, seen as a type that can be copied and written."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _text(text: str) -> Any:
    """Two halves of a character that stand beside each other, JSON would make one."""
    if _plain(text):
        return text
    return {"$text": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")}


def _plain(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _place(path: tuple[str | int, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _refusal(value: object, path: tuple[str | int, ...]) -> ValueError:
    kind = type(value)
    ways_out = (
        (dict, "dict(...) of it"),
        (tuple, "tuple(...) of it"),
        (list, "list(...) of it"),
        (bool | int, "int(...) of it"),
        (float, "float(...) of it"),
        (str, "str.__str__(...) of it"),
        (bytes, "bytes(...) of it"),
        (set | frozenset, "sorted(...) of it, a list"),
        (complex, "a tensor of it"),
        (torch.Generator, "its get_state()"),
        (torch.dtype | torch.device, "str(...) of it"),
    )
    way_out = next((way for kinds, way in ways_out if isinstance(value, kinds)), None)
    if way_out is None and hasattr(value, "state_dict"):
        way_out = "its state_dict()"
    return ValueError(
        f"{_place(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be written "
        f"without pickling it: write {way_out or 'the numbers, texts and tensors it is made of'}"
    )
