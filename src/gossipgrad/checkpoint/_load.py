"""Loads what a rank has saved, or says which file is not what was saved, and why."""

import json
from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

from ._files import check_file, open_tensors, read_plain
from ._layout import TENSORS, TREE, Manifest, folder_of, manifest, steps
from ._tree import decode


def load(
    directory: str | PathLike[str],
    *,
    rank: int,
    step: int | None = None,
    run: str | None = None,
    world_size: int | None = None,
) -> Any:
    """Load the state that a rank has saved.

    Local. Sizes and digests of all files are checked first, nothing is ever unpickled, and what was
    not committed is never read. Digests find damage and mix-ups; who can write to the directory can
    write a checkpoint that passes, with other numbers in it, but no code.

    Args:
        directory: Where checkpoints lie.
        rank: Whose state.
        step: Which; None: the newest that all its ranks have committed, which takes a directory
            that they share.
        run: Refuse that of another run; None: take any.
        world_size: Refuse that of a run of so many ranks at its start; None: take any.

    Returns:
        The tree that `save` was given. Parameters come back as plain tensors, and `OrderedDict` as
        a dict. Tensors are on the CPU, contiguous, in memory of their own.

    Raises:
        ValueError: There is no such checkpoint, or a file of it is missing, truncated, damaged,
            or of another rank, step, run, format or version; the message names the file, and
            older steps that are complete.
    """
    directory = Path(directory)
    found = manifest(directory, rank=rank, step=step, run=run)
    folder = folder_of(directory, found.step, rank)
    if world_size not in (None, found.world_size):
        raise ValueError(
            f"{folder} is of a run of {found.world_size} ranks, not of {world_size}: start as many "
            "ranks, or start from the consensus, which is one for all"
        )
    try:
        return read_state(folder, found)
    except ValueError as error:
        raise ValueError(f"{error}. {_other_steps(directory, found)}") from error


def read_state(folder: Path, found: Manifest, keys: Collection[str] | None = None) -> Any:
    """The state of a manifest, once its files are what it says; of `keys` alone if given."""
    tree = folder / TREE
    for name, entry in found.files.items():
        check_file(folder / name, entry)
    text = read_plain(tree, found.files[TREE].size_bytes)
    try:
        value = json.loads(text)
        if keys is not None and isinstance(value, dict) and next(iter(value), "")[:1] != "$":
            value = {key: value[key] for key in keys if key in value}
        return decode(value, open_tensors(folder / TENSORS))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{tree} cannot be read: {error}") from error


def _other_steps(directory: Path, found: Manifest) -> str:
    others = [step for step in steps(directory) if step != found.step]
    if not others:
        return "There is no other complete checkpoint"
    return f"Load another step on every rank; complete are {', '.join(map(str, others[-5:]))}"
