"""One model of all replicas of a checkpoint; no worker is needed for it."""

import secrets
from os import PathLike
from pathlib import Path

from torch import Tensor

from ._encode import DTYPE_NAMES
from ._files import sync_folder, tensor_chunks, write_file
from ._layout import folder_of, manifest, whole_of
from ._mean import mean_of, replica_of

__all__ = ["consensus", "export_safetensors", "target_of"]


def consensus(
    directory: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    key: str = "model",
    residuals: str = "residuals",
) -> dict[str, Tensor]:
    """The mean over ranks of what they have saved: the model that a run has trained.

    Local, for one process that sees the parts of all ranks. They are read one after another; held
    are the weights of one, and their sum in 64 bits.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        key: Where the state has the weights: a dict of tensors by name, as `model.state_dict()`.
            Where beside it, under `model_names` for `model`, there is a dict of names, the model
            gets those, each with the tensor under the name that it leads to: so that it has tied
            weights under all their names, and not what its own `state_dict()` leaves out.
        residuals: Where the state has what rounding took away from narrow weights, by the same
            names, as far as there is any; it is added.

    Returns:
        By name, on the CPU: floating-point and complex tensors are the mean over ranks, summed in
        64 bits and rounded once to their own type; others are those of the lowest rank.

    Raises:
        ValueError: Ranks are missing (with their numbers), of unlike runs, or have unlike models;
            or a file is not what was saved, and which.
    """
    return mean_of(Path(directory), whole_of(Path(directory), step, run), key, residuals)


def export_safetensors(
    directory: str | PathLike[str],
    path: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    rank: int | None = None,
    key: str = "model",
    residuals: str = "residuals",
    overwrite: bool = False,
) -> Path:
    """Write the consensus of a checkpoint, or the replica of one rank, as a safetensors file.

    The file is there when it is whole, or not at all. What it is of stands in its metadata.

    Args:
        directory: Where checkpoints lie.
        path: The file to write.
        step: Which; None: the newest that is complete.
        run: Refuse that of another run; None: take any.
        rank: None: the consensus; a rank: its replica as it was, without the others.
        key: As for `consensus`.
        residuals: As for `consensus`; replicas are written without it.
        overwrite: Whether a file that is there may be replaced.

    Returns:
        The path written.

    Raises:
        ValueError: As for `consensus`; `path` exists; or a tensor is of a type that safetensors
            cannot hold.
        OSError: The file cannot be written; one that was there stays.
    """
    path = target_of(path, overwrite)
    directory = Path(directory)
    if rank is None:
        whole = whole_of(directory, step, run)
        tensors = mean_of(directory, whole, key, residuals)
        told = {"replica": f"consensus of ranks {', '.join(map(str, whole.members))}"}
    else:
        whole = manifest(directory, rank=rank, step=step, run=run)
        folder = folder_of(directory, whole.step, rank)
        tensors = replica_of(folder, whole, key)
        told = {"replica": f"rank {rank} of {whole.world_size}"}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name!r} is of {tensor.dtype}, which safetensors files do not hold: use "
                "consensus() or load(), which do"
            )
    told |= {"format": "pt", "step": str(whole.step), "run": whole.run}
    # Of no name that somebody else may have: a file that is there is never touched.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_file(partial, tensor_chunks(tensors, told))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def target_of(path: str | PathLike[str], overwrite: bool) -> Path:
    """Where to write; refused before anything is read."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: name another one, or allow to overwrite it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write into: make it first")
    return path
