"""The file of a model for use: safetensors, with the names of its own `state_dict()`."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn

from gossipgrad.comm import saved_tensors


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

    A file that exists is removed first: safetensors writes beside it, and it may be there to
    reserve the space.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
        OSError: The file cannot be written.
    """
    check_types(tensors)
    path.unlink(missing_ok=True)
    try:
        save_file(_apart(tensors), path, {"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # an error of the operating system, as text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check_types(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that safetensors files do not hold; for a dry run before training."""
    by_type = {tensor.dtype: name for name, tensor in tensors.items()}
    for kind, name in by_type.items():
        try:
            save({name: torch.empty(0, dtype=kind)})
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{name!r} is of {kind}, which safetensors files do not hold"
            ) from error


def try_to_write(model: nn.Module) -> None:
    """Refuse a model that `write_safetensors` could not write.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
    """
    check_types(model_tensors(model, copy=False))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        start = one.untyped_storage().data_ptr()
        apart[name] = one.clone() if start in seen else one
        seen.add(start)
    return apart
