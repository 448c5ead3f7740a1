"""The file of a model for use: safetensors, with the names of its own `state_dict()`."""

import errno
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn

from gossipgrad.comm import saved_tensors

from ._save import sync_folder


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors of `model.state_dict()` by name, contiguous in host memory.

    Tied weights stand under each of their names as one tensor, non-persistent buffers under none.
    What `get_extra_state` returns is left out, and hooks of `state_dict` are not called.

    Args:
        model: The model, on any device.
    """
    tensors = saved_tensors(model)
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().contiguous().to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file beside its name, wait until it is on the disk, and rename it.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
        OSError: The file cannot be written; one that was there stays.
    """
    _check_types(tensors)
    # In a folder of the user's: of no name that somebody else may have.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        save_file(_apart(tensors), partial, {"format": "pt", **(metadata or {})})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except SafetensorError as error:  # an error of the operating system, as text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def try_to_write(model: nn.Module) -> None:
    """Refuse a model that `write_safetensors` could not write.

    Raises:
        ValueError: safetensors files do not hold the type of a tensor.
    """
    _check_types(saved_tensors(model))


def _check_types(tensors: Mapping[str, Tensor]) -> None:
    by_type = {tensor.dtype: name for name, tensor in tensors.items()}
    for kind, name in by_type.items():
        try:
            save({name: torch.empty(0, dtype=kind)})
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{name!r} is of {kind}, which safetensors files do not hold"
            ) from error


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
