"""Files of torch's own, which may hold pickled code: a separate door, for input that is trusted."""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ._consensus import consensus, target_of

__all__ = ["export_dcp", "import_dcp", "import_torch"]


def export_dcp(
    directory: str | PathLike[str],
    target: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    key: str = "model",
    residuals: str = "residuals",
) -> Path:
    """Write the consensus of a checkpoint for `torch.distributed.checkpoint`.

    Under `key`, as one process saves `{key: model.state_dict()}`, so that training of any other
    kind (DDP, FSDP on any mesh) loads it as its own. That is one model: of replicas under equal
    names, torch keeps one rank's, so replicas stay in the checkpoint they are in.

    Args:
        directory: Where checkpoints lie.
        target: The folder to write; new or empty.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        key: As for `consensus`.
        residuals: As for `consensus`.

    Returns:
        The folder written.

    Raises:
        ValueError: As for `consensus`, or `target` is there and not empty.
    """
    from torch.distributed import checkpoint

    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists and is no empty folder: name another one")
    target_of(target, overwrite=True)
    weights = consensus(directory, step=step, run=run, key=key, residuals=residuals)
    with _quiet():
        checkpoint.save({key: weights}, checkpoint_id=target, no_dist=True)
    return target


def import_dcp(path: str | PathLike[str], *, trusted: bool) -> dict[str, Any]:
    """Read a folder that `torch.distributed.checkpoint` has written; in one process.

    Args:
        path: The folder.
        trusted: Must be True, to say that whoever wrote the folder may run code here: what lies in
            it is in part a pickle.

    Returns:
        By the names that torch gives, as `model.layer.weight`: tensors, whole and on the CPU, and
        whatever else there is. Of replicas that were saved under equal names, torch has kept one.

    Raises:
        ValueError: `trusted` is not True, or there is no such folder.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = Path(path)
    if trusted is not True:
        raise ValueError(
            f"{path} holds a pickle, which runs code as it is read: import_dcp(..., trusted=True) "
            "if you trust whoever wrote it"
        )
    if not (path / ".metadata").is_file():
        raise ValueError(f"{path} is no folder of torch.distributed.checkpoint: no .metadata in it")
    reader = checkpoint.FileSystemReader(path)
    state: dict[str, Any] = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        if isinstance(kept, TensorStorageMetadata)
        else None
        for name, kept in reader.read_metadata().state_dict_metadata.items()
    }
    with _quiet():
        checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def import_torch(path: str | PathLike[str], *, trusted: bool = False) -> Any:
    """Read a file that `torch.save` has written; tensors come to the CPU.

    Args:
        path: The file.
        trusted: False: only tensors and plain containers are read, and nothing runs. True, and no
            other value: anything is unpickled, so whoever wrote the file may run code here.

    Raises:
        ValueError: The file is none of `torch.save`, or holds more than plain values and `trusted`
            is False.
    """
    path = Path(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=trusted is not True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        if trusted is True or not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{path} is no file of torch.save: {lines[0]}") from error
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is damaged: import_torch(..., "
            "trusted=True) reads it if you trust whoever wrote it, since that may run code"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's word that there is one process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
