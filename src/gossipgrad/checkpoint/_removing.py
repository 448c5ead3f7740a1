"""What a rank removes: its own files, and never the last checkpoint that is whole."""

import contextlib
from os import PathLike
from pathlib import Path

from ._files import sync_folder
from ._layout import all_steps, folder_of, own_steps, step_folders
from ._manifest import MANIFEST, Manifest, is_own_file

__all__ = ["clean", "make_way", "prune", "refuse_foreign", "rewind"]


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
    newer = [one for one, m in own_steps(Path(directory), rank).items() if one > step]
    for one in reversed(newer):
        _remove(folder_of(Path(directory), one, rank))
    return newer[::-1]


def refuse_foreign(directory: Path, rank: int, run: str) -> None:
    """Refuses a directory where this rank has checkpoints of another run."""
    for step, found in own_steps(directory, rank).items():
        if isinstance(found, Manifest) and found.run != run:
            raise ValueError(
                f"{folder_of(directory, step, rank)} is of another run, {found.run!r}: save this "
                f"one, {run!r}, into a directory of its own"
            )


def make_way(directory: Path, part: Manifest, *, shared: bool) -> None:
    """Removes newer parts that a crash left incomplete; refuses to spoil what is complete."""
    own = own_steps(directory, part.rank)
    later = [step for step, found in own.items() if step >= part.step and found is not None]
    complete = set(later)
    if shared and later:
        complete = {found.step for found in all_steps(directory) if found.complete()}
    for step in later[::-1]:
        if step in complete or isinstance(own[step], str):
            what = "lies there already" if step == part.step else f"is older than step {step} there"
            raise ValueError(
                f"step {part.step} cannot be saved into {directory}, since it {what}: to go on "
                "from an older one, call rewind(...) on every rank as it starts, or save into a "
                "directory of its own"
            )
    for step in later[::-1]:
        if step > part.step:
            _remove(folder_of(directory, step, part.rank))


def clean(directory: Path, rank: int, *, before: int) -> None:
    """Removes what this rank's killed or failed saves left, and empty folders of steps `before`."""
    for step, found in own_steps(directory, rank).items():
        folder = folder_of(directory, step, rank)
        if found is None:
            _remove(folder)
        elif isinstance(found, Manifest):
            for path in folder.iterdir():
                if path.name != MANIFEST and path.name not in found.files:
                    _unlink(path)
    for step, folder in step_folders(directory):
        # Of somebody killed before there was more; who makes a newer one may be about to fill it.
        if step < before:
            with contextlib.suppress(OSError):
                folder.rmdir()


def prune(directory: Path, part: Manifest, *, keep: int, shared: bool) -> list[int]:
    """Removes what need not be kept; returns own steps that wait for other ranks.

    Once a step is complete, every rank of it is past all older ones: what is incomplete of those
    stays so. A rank that removes has seen `keep` newer ones complete, and so has everyone who
    removes those: the newest complete one is never removed by anyone.
    """
    own = [s for s, m in own_steps(directory, part.rank).items() if isinstance(m, Manifest)]
    complete = own
    if shared:
        complete = [
            found.step
            for found in all_steps(directory)
            if any(whole.run == part.run for whole in found.complete())
        ]
    if not complete:
        return own
    for step in own:
        if step < complete[-1] and step not in complete[-keep:]:
            _remove(folder_of(directory, step, part.rank))
    return [step for step in own if step > complete[-1]]


def _remove(folder: Path) -> None:
    """The manifest first: what is left by a kill is no checkpoint."""
    manifest = folder / MANIFEST
    if manifest.exists():
        manifest.unlink()
        sync_folder(folder)
    for path in folder.iterdir():
        _unlink(path)
    # Where somebody else keeps something, the folder stays.
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _unlink(path: Path) -> None:
    if is_own_file(path.name):
        path.unlink(missing_ok=True)
