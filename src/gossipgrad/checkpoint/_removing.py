"""What a rank removes: its own files, and never the last checkpoint that is whole."""

import contextlib
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path

from ._files import sync_folder
from ._layout import folder_of, own_folders, own_steps, rank_folders, step_folders, steps
from ._manifest import MANIFEST, OWN_FILES, Manifest, read_manifest


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


def make_way(directory: Path, part: Manifest, *, shared: bool) -> list[str]:
    """Removes newer parts that a crash left incomplete; refuses to spoil what is complete.

    Returns:
        What could not be removed, and why.
    """
    found = own_steps(directory, part.rank, since=part.step)
    later = [step for step, one in found.items() if one is not None]
    complete = set(later)
    if shared and later:
        complete = set(steps(directory))
    same = found.get(part.step)
    if isinstance(same, Manifest) and part.attempt and same.attempt == part.attempt:
        raise ValueError(
            f"rank {part.rank} has committed step {part.step} in {directory} in this start; where "
            "several processes are one rank, as shards of a replica are, each saves into a "
            "directory of its own"
        )
    for step in later[::-1]:
        if step in complete or isinstance(found[step], str):
            what = "lies there already" if step == part.step else f"is older than step {step} there"
            raise ValueError(
                f"step {part.step} cannot be saved into {directory}, since it {what}: to go on "
                "from an older one, call rewind(...) on every rank as it starts, or save into a "
                "directory of its own"
            )
    newer = [step for step in later[::-1] if step > part.step]
    return _tried(remove_part, [folder_of(directory, step, part.rank) for step in newer])


def clean(directory: Path, rank: int, *, before: int) -> list[str]:
    """Removes what this rank's killed or failed saves left, and empty folders of steps `before`.

    Returns:
        What could not be removed, and why.
    """
    left = _tried(_clean_part, [folder for _, folder in own_folders(directory, rank)])
    for step, folder in step_folders(directory):
        # Of somebody killed before there was more; who makes a newer one may be about to fill it.
        if step < before:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return left


def prune(
    directory: Path, part: Manifest, *, keep: int, shared: bool
) -> tuple[list[int], list[str]]:
    """Removes what need not be kept.

    Once a step is complete, every rank of it is past all older ones: what is incomplete of those
    stays so. A rank that removes has seen `keep` newer ones complete, and so has everyone who
    removes those: the newest complete one is never removed by anyone.

    Returns:
        Own steps that wait for other ranks; what could not be removed, and why.
    """
    own = steps(directory, rank=part.rank)
    complete = steps(directory, run=part.run) if shared else own
    if not complete:
        return own, []
    old = [step for step in own if step < complete[-1] and step not in complete[-keep:]]
    left = _tried(remove_part, [folder_of(directory, step, part.rank) for step in old])
    return [step for step in own if step > complete[-1]], left


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


def _clean_part(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        remove_part(folder)


def _tried(act: Callable[[Path], None], paths: Iterable[Path]) -> list[str]:
    """Does it to each; says where that failed, and goes on."""
    left = []
    for path in paths:
        try:
            act(path)
        except OSError as error:
            left.append(f"{error.filename or path}: {error.strerror or error}")
    return left
