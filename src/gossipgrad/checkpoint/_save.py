"""Saves what a rank has; the manifest, renamed last, is the commit."""

import contextlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from ._files import sync_folder, tensor_chunks, write_file
from ._layout import folder_of
from ._manifest import MANIFEST, PARTIAL, TENSORS, TREE, Manifest, impossible_rank
from ._removing import clean, make_way, prune, refuse_foreign, remove_part
from ._tree import Encoded, encode


def save(
    directory: str | PathLike[str],
    state: object,
    *,
    rank: int,
    world_size: int,
    step: int,
    run: str = "",
    attempt: str = "",
    members: Sequence[int] | None = None,
    keep: int | None = None,
    shared: bool = True,
) -> Path:
    """Save the state of one rank; returns when it is on the disk.

    Local: ranks do not wait for each other. What a rank saves lies in a folder of its own, so that
    replicas that differ all stay, and is committed as a whole: killed at any instant, `save` leaves
    what was committed before as it was, and what it has begun is removed by the rank's next one.
    A step is complete when all `members` have committed it. Nothing is pickled.

    What a rank knows of the others is what it sees in `directory`. Where all share it, with `keep`
    a rank removes its own part of a step once `keep` newer ones are complete on all ranks, so the
    last complete one stays, whichever rank dies or fails to save. Where they do not
    (`shared=False`), a rank sees its own parts alone, and keeps the last `keep` of those: if
    another fails to save as often in a row, there may be no step that both still have. Files of a
    rank that is no member any more are never removed.

    Args:
        directory: Where checkpoints lie; made if it is not there.
        state: Dicts (keys of type str or int; also `OrderedDict` and `Counter`), lists, tuples,
            tensors, numpy arrays, int, float, bool, None, str and bytes, nested. Every bit of it
            comes back, as these types. Tensors of the same memory are written once, and share it
            again when loaded.
        rank: This rank.
        world_size: How many ranks there were at the start.
        step: Steps done, the same on all ranks for what belongs together.
        run: Names the run, the same for all ranks and starts: a directory holds those of one.
        attempt: Names this start of the run, the same on all ranks, such as a number that one draws
            and broadcasts: parts that were saved before and after a resume never make one
            checkpoint. Empty: the caller takes care, with `rewind`.
        members: Ranks that live, ascending, those who joined with numbers from `world_size` on;
            None: all of `range(world_size)`. Ranks that name other members (one is given up
            meanwhile) make no complete checkpoint in that step.
        keep: How many complete ones stay, 1 or more; None: all.
        shared: Whether all ranks share `directory`.

    Returns:
        The folder of this rank.

    Raises:
        ValueError: `state` holds something that cannot be written, with its path in the tree;
            an argument cannot be; or `directory` holds checkpoints of another run, or newer
            complete ones. Nothing is written.
        OSError: The disk is full, or what else keeps files from being written. What was committed
            before stays. What keeps old files from being removed is a warning.

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
    part = part_of(rank, world_size, step, run=run, attempt=attempt, members=members)
    written = commit(Path(directory), encode(state), part, keep=keep, shared=shared)
    if written.left:
        warnings.warn(f"{describe_left(written)}.", stacklevel=2)
    return written.folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What became of a save."""

    folder: Path
    waiting: list[int]
    """Own steps that cannot be removed, for other ranks have not committed them or a newer one."""
    left: list[str]
    """What went wrong beside the commit: mostly files that could not be removed."""
    size_bytes: int


def describe_left(written: Written) -> str:
    """The message about what went wrong beside it, without a full stop."""
    more = f" and {len(written.left) - 1} more" if len(written.left) > 1 else ""
    return (
        f"a checkpoint is saved in {written.folder}, but not all went well beside it: "
        f"{written.left[0]}{more}"
    )


def part_of(
    rank: int,
    world_size: int,
    step: int,
    *,
    run: str,
    attempt: str,
    members: Sequence[int] | None,
) -> Manifest:
    """A manifest that has no files yet."""
    if members is None and not 0 <= rank < world_size:
        raise ValueError(impossible_rank(rank, world_size))
    return Manifest(
        run=run,
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        members=tuple(range(world_size) if members is None else members),
        step=step,
        files={},
    )


def check_keep(keep: int | None) -> None:
    """Refuses what would keep nothing."""
    if keep is not None and keep < 1:
        raise ValueError(
            f"keep={keep} would keep no checkpoint: give 1 or more, or None to keep all"
        )


def commit(
    directory: Path,
    encoded: Encoded,
    part: Manifest,
    *,
    keep: int | None,
    shared: bool,
) -> Written:
    """Write, commit, remove what is old; all but the encoding of `save`."""
    refuse_foreign(directory, part.rank, part.run, newest=True)
    left = make_way(directory, part, shared=shared)
    left += clean(directory, part.rank, before=part.step)
    folder = folder_of(directory, part.step, part.rank)
    if folder.exists():
        remove_part(folder)  # of a step that never was complete
    named = [folder, folder.parent, directory]
    named += [path.parent for path in (directory, *directory.parents) if not path.exists()]
    _make(folder)
    text = json.dumps(encoded.tree, separators=(",", ":")).encode("ascii")
    metadata = {"gossipgrad": "read it by gossipgrad.checkpoint.load"}
    try:
        files = {
            TENSORS: write_file(folder / TENSORS, tensor_chunks(encoded.tensors, metadata)),
            TREE: write_file(folder / TREE, [text]),
        }
        done = replace(part, files=files)
        write_file(folder / PARTIAL, [done.text().encode("ascii")])
        (folder / PARTIAL).replace(folder / MANIFEST)
    except BaseException:
        # An interrupt may come when the rename is done: then all of it stays.
        if not (folder / MANIFEST).exists():
            for name in (TENSORS, TREE, PARTIAL):
                with contextlib.suppress(OSError):
                    (folder / name).unlink(missing_ok=True)
        raise
    return _tidied(directory, done, named, left, keep=keep, shared=shared)


def _tidied(
    directory: Path,
    done: Manifest,
    named: Sequence[Path],
    left: list[str],
    *,
    keep: int | None,
    shared: bool,
) -> Written:
    """What is committed stays so: from here on errors are warnings."""
    folder = folder_of(directory, done.step, done.rank)
    waiting: list[int] = []
    try:
        for path in named:
            sync_folder(path)
        if keep is not None:  # none before it is known that the new one is on the disk
            waiting, not_removed = prune(directory, done, keep=keep, shared=shared)
            left += not_removed
    except OSError as error:
        left.append(f"{error.filename or folder}: {error.strerror or error}")
    size_bytes = sum(entry.size_bytes for entry in done.files.values())
    return Written(folder=folder, waiting=waiting, left=left, size_bytes=size_bytes)


def _make(folder: Path) -> None:
    """Another rank that removes its part of the step may remove that folder meanwhile."""
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)
