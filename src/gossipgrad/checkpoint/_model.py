"""The file of a model for use: safetensors, with the names of its own `state_dict()`."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from gossipgrad.comm import saved_tensors

from ._files import tensor_chunks
from ._tree import DTYPE_NAMES


def model_tensors(model: nn.Module, *, copy: bool = True) -> dict[str, Tensor]:
    """Return the tensors of `model.state_dict()` by name, for `model.load_state_dict()`.

    Tied weights stand under each of their names, non-persistent buffers under none. What
    `get_extra_state` returns is left out, and hooks of `state_dict` are not called.

    Args:
        model: The model, on any device.
        copy: Whether to return contiguous copies in host memory, one of each tensor. Otherwise
            tensors share memory with the model.
    """
    tensors = saved_tensors(model)
    if not copy:
        return tensors
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().contiguous().to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file and wait until it is on the disk.

    A file that exists is overwritten in place, so that it can reserve the space.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
        OSError: The file cannot be written.
    """
    check_types(tensors)
    with path.open("r+b" if path.exists() else "xb") as file:
        for chunk in tensor_chunks(tensors, metadata or {}):
            file.write(chunk)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def try_to_write(model: nn.Module) -> None:
    """Go through all that `write_safetensors` does for a model, without a file.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
    """
    tensors = model_tensors(model, copy=False)
    check_types(tensors)
    for _ in tensor_chunks(tensors, {}):
        pass


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that safetensors files do not hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name!r} is of {tensor.dtype}, which safetensors files do not hold")
