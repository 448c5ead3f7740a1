"""A state as JSON and tensors by name, and back: plain values only, nothing is ever unpickled."""

import base64
import binascii
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# As safetensors files name them; tensors of other types are written as their bytes.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
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
_MAX_DEPTH = 100
_WAYS_OUT: tuple[tuple[Any, str], ...] = (
    (set | frozenset, "sorted(...) of it, a list"),
    (complex, "a tensor of it"),
    (torch.Generator, "its get_state()"),
    (torch.dtype | torch.device, "str(...) of it"),
)

Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What is to be written."""

    tree: Any
    """Of what JSON knows; where a tensor was, its name."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Detached, without a copy; not yet on the CPU."""


def encode(state: object) -> Encoded:
    """Take a state apart. Plain values are copied, tensors are not.

    Raises:
        ValueError: Something in it cannot be written; with its path, its type and the way out.
    """
    walk = _Encoder()
    return Encoded(tree=walk.value(state, ()), tensors=walk.tensors)


def decode(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Put a state together.

    Args:
        tree: As `encode` made it, and JSON brought it back.
        tensor: Gives the tensor of a name, in memory that is the caller's.

    Raises:
        ValueError: The tree is none that `encode` makes, or names a tensor that is not there.
    """
    try:
        return _Decoder(tensor).value(tree)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, binascii.Error) as error:
        raise ValueError(f"it is no tree of state ({type(error).__name__}: {error})") from error


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def value(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if len(path) >= _MAX_DEPTH:
            raise ValueError(
                f"{_place(path[:3])} nests deeper than {_MAX_DEPTH}: a state that holds itself "
                "cannot be written"
            )
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind in (list, tuple):
            items = [self.value(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, path)
        if isinstance(value, Tensor):
            return self._tensor(_checked(value, path), path)
        if kind is np.ndarray or isinstance(value, np.generic):
            try:
                tensor = torch.from_numpy(np.array(value))
            except TypeError:
                raise ValueError(
                    f"{_place(path)} is an array of {value.dtype}, which cannot be written: only "
                    "arrays of numbers and of bool can, in this machine's byte order"
                ) from None
            return {"$array" if kind is np.ndarray else "$scalar": self._tensor(tensor, path)}
        raise _refusal(value, path)

    def _mapping(self, mapping: dict[Any, Any], path: Path) -> Any:
        for key in mapping:
            if type(key) not in (str, int):
                raise ValueError(
                    f"{_place(path)} has the key {key!r} of type {type(key).__name__}: keys must "
                    "be of type str or int to be written"
                )
        items = {key: self.value(item, (*path, key)) for key, item in mapping.items()}
        if type(mapping) is Counter:
            return {"$counter": [[key, item] for key, item in items.items()]}
        if all(type(key) is str and key[:1] != "$" for key in items):
            return items
        return {"$dict": [[key, item] for key, item in items.items()]}

    def _tensor(self, tensor: Tensor, path: Path) -> dict[str, Any]:
        # The same memory is written once, and is the same again when it is read.
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.get(where) if tensor.numel() else None
        plain = tensor.dtype in DTYPE_NAMES
        if name is None:
            name = self._names[where] = self._new_name(path)
            if not plain:
                try:
                    tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
                except NotImplementedError:
                    raise ValueError(
                        f"{_place(path)} is of {tensor.dtype}, which torch cannot copy: write a "
                        "view of it as torch.uint8"
                    ) from None
            self.tensors[name] = tensor
        if plain:
            return {"$tensor": name}
        kind = str(where[2]).removeprefix("torch.")
        return {"$tensor": name, "dtype": kind, "shape": list(where[3])}

    def _new_name(self, path: Path) -> str:
        """By the path, for people who open the file; unlike any other."""
        name = "/".join(map(str, path)).encode("ascii", "backslashreplace").decode() or "state"
        found, count = name, 1
        while found in self.tensors or found == "__metadata__":
            count += 1
            found = f"{name}#{count}"
        return found


class _Decoder:
    def __init__(self, tensor: Callable[[str], Tensor]) -> None:
        self._tensor = tensor
        self._found: dict[str, Tensor] = {}

    def value(self, tree: Any) -> Any:
        if type(tree) is list:
            return [self.value(item) for item in tree]
        if type(tree) is not dict:
            return tree
        tag = next(iter(tree), "")
        if tag[:1] != "$":
            return {key: self.value(item) for key, item in tree.items()}
        inner = tree[tag]
        if tag == "$tensor":
            return self._placed(**{"name": inner, **{k: tree[k] for k in tree if k != tag}})
        if tag == "$tuple":
            return tuple(map(self.value, inner))
        if tag in ("$dict", "$counter"):
            pairs = {key: self.value(item) for key, item in inner}
            return pairs if tag == "$dict" else Counter(pairs)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
        if tag == "$array":
            return self.value(inner).numpy()
        if tag == "$scalar":
            return self.value(inner).numpy()[()]
        raise KeyError(tag)

    def _placed(
        self, name: str, dtype: str | None = None, shape: list[int] | None = None
    ) -> Tensor:
        if name not in self._found:
            tensor = self._tensor(name)
            if dtype is not None:
                kind = getattr(torch, dtype)
                if not isinstance(kind, torch.dtype):
                    raise KeyError(dtype)
                tensor = tensor.view(kind).reshape(shape or [])
            self._found[name] = tensor
        return self._found[name]


def _checked(tensor: Tensor, path: Path) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{_place(path)} is a {type(tensor).__name__}, a kind of tensor that cannot be "
            "written: convert it to a plain torch.Tensor; of a DTensor, each rank writes its own "
            "to_local()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ValueError(
            f"{_place(path)} is a sparse, quantized or nested tensor, which cannot be written: "
            "make it dense, by to_dense(), dequantize() or to_padded_tensor()"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{_place(path)} is on the meta device and holds no values: give the model memory "
            "first, by to_empty() and an initialisation"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _place(path: Path) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _refusal(value: object, path: Path) -> ValueError:
    kind = type(value)
    way_out = next((way for kinds, way in _WAYS_OUT if isinstance(value, kinds)), None)
    if way_out is None and hasattr(value, "state_dict"):
        way_out = "its state_dict()"
    return ValueError(
        f"{_place(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be written "
        f"without pickling it: write {way_out or 'the numbers, texts and tensors it is made of'}"
    )
