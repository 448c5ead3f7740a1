"""Saves what a rank has; the manifest, renamed last, is the commit. Removes what is not kept."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from ._files import sync_folder, tensor_chunks, write_file
from ._layout import (
    MANIFEST,
    OWN_FILES,
    PARTIAL,
    TENSORS,
    TREE,
    Manifest,
    folder_of,
    impossible_rank,
    own_folders,
    own_steps,
    rank_folders,
    read_manifest,
    step_folders,
    steps,
)
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
            comes back, `OrderedDict` as a dict and tensors contiguous. Tensors of the same memory
            are written once, and share it again when loaded.
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
    left = _make_way(directory, part, shared=shared)
    left += _clean(directory, part.rank, before=part.step)
    folder = folder_of(directory, part.step, part.rank)
    if folder.is_symlink():
        folder.unlink()  # readers ignore it, and nothing is written where it leads
    elif folder.exists():
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
    # What is committed stays so: from here on errors are warnings.
    try:
        for path in named:
            sync_folder(path)
        if keep is not None:  # none before it is known that the new one is on the disk
            left += _prune(directory, done, keep=keep, shared=shared)
    except OSError as error:
        left.append(f"{error.filename or folder}: {error.strerror or error}")
    size_bytes = sum(entry.size_bytes for entry in done.files.values())
    return Written(folder=folder, left=left, size_bytes=size_bytes)


def _make(folder: Path) -> None:
    """Another rank that removes its part of the step may remove that folder meanwhile."""
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def rewind(directory: str | PathLike[str], *, rank: int, step: int) -> list[int]:
    """Remove what a rank has committed after a step, for a run that goes on from that step.

    Local. Without it, checkpoints of the training that is being given up would be taken for newer
    ones. Call it on every rank before any of them trains on: after a crash some ranks have newer
    parts than others.

    Args:
        directory: Where checkpoints lie.
        rank: Whose files; those of other ranks stay.
        step: Stays, and so does what is older.

    Returns:
        The steps removed, the newest first.

    Raises:
        OSError: A file cannot be removed; calling it again goes on.

    Example:
        >>> rewind("nowhere", rank=0, step=100)
        []
    """
    newer = [(one, folder) for one, folder in own_folders(Path(directory), rank) if one > step]
    for _, folder in reversed(newer):
        remove_part(folder)
    return [one for one, _ in reversed(newer)]


def remove_all(directory: str | PathLike[str]) -> list[int]:
    """Remove the checkpoints of all ranks and all steps; for one process, while nobody saves.

    Files that no checkpoint has, and links to other folders, stay.

    Args:
        directory: Where checkpoints lie.

    Returns:
        The steps of which something was removed, the newest first.

    Raises:
        OSError: A file cannot be removed; calling it again goes on.

    Example:
        >>> remove_all("nowhere")
        []
    """
    removed = []
    for step, folder in reversed(step_folders(Path(directory))):
        parts = [] if folder.is_symlink() else rank_folders(folder)
        for part in parts:
            remove_part(part)
        removed += [step] * bool(parts)
        with contextlib.suppress(OSError):
            folder.rmdir()
    return removed


def refuse_foreign(directory: Path, rank: int, run: str, *, newest: bool = False) -> None:
    """Refuses a directory where this rank has checkpoints of another run.

    With `newest` that one alone is read: who has saved into it has looked at all others before.
    """
    for step, folder in reversed(own_folders(directory, rank)):
        try:
            found = read_manifest(folder / MANIFEST)
        except (FileNotFoundError, ValueError):
            continue
        if found.run != run:
            raise ValueError(
                f"{folder_of(directory, step, rank)} is of another run, {found.run!r}: save this "
                f"one, {run!r}, into a directory of its own"
            )
        if newest:
            return


def _make_way(directory: Path, part: Manifest, *, shared: bool) -> list[str]:
    """Removes newer parts that a crash left incomplete; refuses to spoil what is complete.

    Returns:
        What could not be removed, and why.
    """
    found = own_steps(directory, part.rank, since=part.step)
    there = [step for step, one in found.items() if one is not None]
    complete = {*steps(directory)} if shared and there else {*there}
    same = found.get(part.step)
    if isinstance(same, Manifest) and part.attempt and same.attempt == part.attempt:
        raise ValueError(
            f"rank {part.rank} has committed step {part.step} in {directory} in this start; where "
            "several processes are one rank, as shards of a replica are, each saves into a "
            "directory of its own"
        )
    for step in there[::-1]:
        if step in complete or isinstance(found[step], str):
            what = "lies there already" if step == part.step else f"is older than step {step} there"
            raise ValueError(
                f"step {part.step} cannot be saved into {directory}, since it {what}: to go on "
                "from an older one, call rewind(...) on every rank as it starts, or save into a "
                "directory of its own"
            )
    newer = [step for step in there[::-1] if step > part.step]
    return _tried(remove_part, [folder_of(directory, step, part.rank) for step in newer])


def _clean(directory: Path, rank: int, *, before: int) -> list[str]:
    """Removes what this rank's killed or failed saves left, and empty folders of steps `before`.

    Returns:
        What could not be removed, and why.
    """
    killed = [folder for _, folder in own_folders(directory, rank)]
    left = _tried(remove_part, [each for each in killed if not (each / MANIFEST).exists()])
    for step, folder in step_folders(directory):
        # Of somebody killed before there was more; who makes a newer one may be about to fill it.
        if step < before:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return left


def _prune(directory: Path, part: Manifest, *, keep: int, shared: bool) -> list[str]:
    """Removes what need not be kept; says what could not be removed, and why.

    Once a step is complete, every rank of it is past all older ones: what is incomplete of those
    stays so. A rank that removes has seen `keep` newer ones complete, and so has everyone who
    removes those: the newest complete one is never removed by anyone.
    """
    own = steps(directory, rank=part.rank)
    complete = steps(directory, run=part.run) if shared else own
    old = [step for step in own if step < max(complete, default=0) and step not in complete[-keep:]]
    return _tried(remove_part, [folder_of(directory, step, part.rank) for step in old])


def remove_part(folder: Path) -> None:
    """Removes the files of a part, the manifest first: what a kill leaves is no checkpoint."""
    manifest = folder / MANIFEST
    if manifest.exists():
        manifest.unlink()
        sync_folder(folder)
    for path in folder.iterdir():
        if path.name in OWN_FILES:
            path.unlink(missing_ok=True)
    # Where somebody else keeps something, the folder stays.
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _tried(act: Callable[[Path], None], paths: Iterable[Path]) -> list[str]:
    """Does it to each; says where that failed, and goes on."""
    left = []
    for path in paths:
        try:
            act(path)
        except OSError as error:
            left.append(f"{error.filename or path}: {error.strerror or error}")
    return left
