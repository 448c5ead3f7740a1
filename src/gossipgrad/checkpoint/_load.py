"""Loads what a rank has saved, or says which file is not what was saved, and why."""

import hashlib
import pickle
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ._layout import describe_complete, manifest_of, state_path


def load(
    directory: str | PathLike[str],
    *,
    rank: int,
    step: int | None = None,
    run: str | None = None,
    world_size: int | None = None,
    mmap: bool = False,
) -> Any:
    """Load the state that a rank has saved.

    Local. The digest of the file is checked first, it is read by `torch.load(weights_only=True)`,
    and what was not committed is never read. The digest finds damage and mix-ups; who can write to
    the directory can write other numbers, but no code.

    Args:
        directory: Where checkpoints lie.
        rank: Whose state.
        step: Which; None: the newest that all its ranks have committed, which takes a directory
            that they share.
        run: Refuse that of another run; None: take any.
        world_size: Refuse that of a run of so many ranks at its start; None: take any.
        mmap: Map the tensors from the file in place of reading them, to look at a part of them.

    Returns:
        What `save` was given, with plain tensors on the CPU.

    Raises:
        ValueError: There is no such checkpoint, or a file of it is missing, damaged, or of
            another rank, step or run; the message names the file.
    """
    directory = Path(directory)
    found = manifest_of(directory, rank, step, run)
    path = state_path(directory, found.step, rank)
    if world_size not in (None, found.world_size):
        raise ValueError(
            f"{path} is of a run of {found.world_size} ranks, not of {world_size}: start as many "
            "ranks, or start from the consensus, which is one for all"
        )
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != found.sha256:
            raise ValueError("it was changed or damaged, its digest does not fit")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; {describe_complete(directory)}"
        ) from error
