"""Saves what a rank has; the manifest, renamed last, is the commit. Removes what is not kept."""

import contextlib
import dataclasses
import errno
import hashlib
import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gossipgrad._messages import warn

from ._layout import (
    Manifest,
    manifest_path,
    own_files,
    read_manifest,
    state_path,
    step_folder,
    step_folders,
    steps,
)

_PLAIN = (bool, int, float, str, bytes, type(None))


def save(
    directory: str | PathLike[str],
    state: object,
    *,
    rank: int,
    world_size: int,
    step: int,
    run: str = "",
    members: Sequence[int] | None = None,
    keep: int | None = None,
) -> Path:
    """Save the state of one rank; returns when it is on the disk.

    Local: ranks do not wait for each other. Each rank writes a file of its own by `torch.save`,
    then a manifest, renamed last: killed at any instant, `save` leaves what was committed before.
    A step is complete when all `members` have committed it. The one that commits it last removes
    what is older than the last `keep` complete steps, for all ranks.

    Args:
        directory: Where checkpoints lie, on a file system that all ranks share; made if it does not
            exist. On a disk of its own a rank saves as the only one, `rank=0, world_size=1`.
        state: Dicts, lists, tuples, tensors, int, float, bool, None, str and bytes, nested: what
            `torch.load(weights_only=True)` reads.
        rank: This rank.
        world_size: How many ranks there were at the start.
        step: Steps done, the same on all ranks for what belongs together.
        run: Names the run, the same for all ranks and starts: a directory holds those of one.
        members: Living ranks, ascending, those that joined with numbers from `world_size` on;
            None: all of `range(world_size)`.
        keep: How many complete steps stay, 1 or more; None: all.

    Returns:
        The file of the state.

    Raises:
        ValueError: `state` holds something that cannot be written, with its path in the tree; an
            argument is impossible; or `directory` holds checkpoints of another run, or this step
            or a newer one of this rank (call `rewind` on every rank before a run continues from
            an older step). Nothing is written.
        OSError: The disk is full, or something else keeps files from being written. What was
            committed before stays. What keeps old files from being removed is a warning.

    Example:
        >>> import tempfile, torch
        >>> from gossipgrad import checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     state = {"model": {"w": torch.ones(2)}, "epoch": 3}
        ...     path = checkpoint.save(directory, state, rank=0, world_size=1, step=120)
        ...     checkpoint.load(directory, rank=0)
        {'model': {'w': tensor([1., 1.])}, 'epoch': 3}
    """
    check_keep(keep)
    part = part_of(rank, world_size, step, run=run, members=members)
    problem = commit(Path(directory), copied(state), part, keep=keep)
    if problem is not None:
        warn(problem)
    return state_path(Path(directory), step, rank)


def part_of(
    rank: int, world_size: int, step: int, *, run: str, members: Sequence[int] | None
) -> Manifest:
    """A manifest that has no file yet."""
    everyone = range(world_size) if members is None else members
    return Manifest(run=run, rank=rank, world_size=world_size, members=tuple(everyone), step=step)


def check_keep(keep: int | None) -> None:
    """Refuse what would keep nothing."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint: give 1 or more, or None for all")


def copied(state: object, copy: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Rebuild a state with `copy` of each tensor in its place; the same tensor is copied once."""
    # Without `copy`, tensors stay, but for views of something larger: a file would hold all of it.
    seen: dict[tuple[Any, ...], Tensor] = {}

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return tensor(value.detach(), where)
        if isinstance(value, dict):
            for key in value:
                if type(key) not in _PLAIN and not isinstance(key, str):
                    refuse(key, f"{where} (a key)")
            return {key: walk(one, f"{where}[{key!r}]") for key, one in value.items()}
        if isinstance(value, list):
            return [walk(one, f"{where}[{i}]") for i, one in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(walk(one, f"{where}[{i}]") for i, one in enumerate(value))
        if isinstance(value, _PLAIN):
            return value
        return refuse(value, where)

    def tensor(value: Tensor, where: str) -> Tensor:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            refuse(value, where)
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() == 0 or key not in seen:
            whole = value.untyped_storage().nbytes() <= value.numel() * value.element_size()
            seen[key] = copy(value) if copy else value if whole else value.clone()
        return seen[key]

    try:
        return walk(state, "state")
    except RecursionError:
        raise ValueError("the state holds itself, or is nested too deeply to be written") from None


def refuse(value: object, where: str) -> Any:
    """Say what cannot be written."""
    kind = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else type(value)
    raise ValueError(
        f"{where} is {kind}, which a checkpoint cannot hold: give tensors, dicts, lists, tuples, "
        "numbers, text, bytes or None; arrays by torch.from_numpy, sets by sorted(...), "
        "generators by get_state()"
    )


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Write a file beside its name, wait until it is on the disk, rename it; its SHA-256."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # what a kill has left; never written through a link
    try:
        with partial.open("x+b") as file:
            try:
                write(file)
            except RuntimeError as error:
                # torch.save hides why it could not write behind a message about positions.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return digest


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def commit(directory: Path, state: object, part: Manifest, *, keep: int | None) -> str | None:
    """Write a state and its manifest, then remove what is old; returns what went wrong after it."""
    refuse_occupied(directory, part)
    folder = step_folder(directory, part.step)
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link: remove it, or save into another directory")
    folder.mkdir(parents=True, exist_ok=True)
    path = state_path(directory, part.step, part.rank)
    manifest = manifest_path(directory, part.step, part.rank)
    try:
        digest = write_whole(path, lambda file: torch.save(state, file))
        done = dataclasses.replace(part, sha256=digest)
        write_whole(manifest, lambda file: file.write(done.text().encode()))
    except BaseException:
        if not manifest.exists():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    try:  # it is committed: from here on an error is a message
        for one in (folder, directory, directory.absolute().parent):
            sync_folder(one)
        if keep is not None:
            prune(directory, part, keep=keep)
    except (OSError, ValueError) as error:
        return f"{path} is saved, but not all went well after it: {error}"
    return None


def refuse_occupied(directory: Path, part: Manifest) -> None:
    """Refuse a directory of another run, or one where this rank is as far or further."""
    for step, _ in reversed(step_folders(directory)):
        if (found := read_manifest(directory, step, part.rank)) is None:
            continue
        path = manifest_path(directory, step, part.rank)
        if found.run != part.run:
            raise ValueError(
                f"{path} is of another run, {found.run!r}: save this one, {part.run!r}, into a "
                "directory of its own"
            )
        if step >= part.step:
            raise ValueError(
                f"step {part.step} of rank {part.rank} cannot be saved beside {path}: to continue "
                "from an older step, call rewind(...) on every rank first; where several "
                "processes are one rank, as shards of a replica are, each saves into a directory "
                "of its own"
            )
        return


def prune(directory: Path, part: Manifest, *, keep: int) -> None:
    """Remove what is older than the last `keep` complete steps, and incomplete ones among these."""
    # The rank that commits a step last does it for all; the others are past older steps.
    folder = step_folder(directory, part.step)
    committed = {rank for rank, path in own_files(folder) if path.suffix == ".json"}
    if not committed.issuperset(part.members):
        return
    folders = step_folders(directory)
    kept = steps(directory, run=part.run)[-keep:]
    _remove([path for step, path in folders if step < max(kept, default=0) and step not in kept])


def rewind(directory: str | PathLike[str], *, rank: int, step: int) -> list[int]:
    """Remove what a rank has saved after a step, for a run that continues from that step.

    Local. Call it on every rank before any of them trains on: after a crash some ranks have newer
    parts than others, which must not count as newer checkpoints.

    Args:
        directory: Where checkpoints lie.
        rank: Whose files; those of other ranks stay.
        step: Stays, and so does what is older.

    Returns:
        The steps removed, the newest first.

    Raises:
        OSError: A file cannot be removed; calling it again continues.

    Example:
        >>> rewind("nowhere", rank=0, step=100)
        []
    """
    newer = [path for one, path in step_folders(Path(directory)) if one > step]
    return _remove(newer, rank=rank)


def remove_all(directory: str | PathLike[str]) -> list[int]:
    """Remove the checkpoints of all ranks and all steps; for one process, while nobody saves.

    Files that no checkpoint has, and symbolic links to other folders, stay.

    Args:
        directory: Where checkpoints lie.

    Returns:
        The steps of which something was removed, the newest first.

    Raises:
        OSError: A file cannot be removed; calling it again continues.

    Example:
        >>> remove_all("nowhere")
        []
    """
    return _remove([path for _, path in step_folders(Path(directory))])


def _remove(folders: Sequence[Path], rank: int | None = None) -> list[int]:
    """Remove the files of a rank, or of all, the newest step first; and folders that get empty."""
    removed = []
    for folder in reversed(folders):
        mine = [path for one, path in own_files(folder) if rank in (None, one)]
        for path in mine:
            path.unlink(missing_ok=True)
        removed += [int(folder.name.removeprefix("step-"))] * bool(mine)
        with contextlib.suppress(OSError):
            folder.rmdir()
    return removed
