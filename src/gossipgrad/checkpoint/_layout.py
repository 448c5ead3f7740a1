"""Where checkpoints lie, what a rank has committed, and which steps are complete."""

import dataclasses
import itertools
import json
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

_STEP = re.compile(r"step-(\d{9,})")
_FILE = re.compile(r"rank-(\d{4,})\.(pt|json)(\.partial)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a rank has committed: whose state, of which step, in which file.

    Raises:
        ValueError: A rank, step or world size is impossible, or `rank` is not among `members`.
    """

    run: str
    """Name of the run, the same over all its starts; empty if it has none."""
    rank: int
    world_size: int
    """Ranks at the start."""
    members: tuple[int, ...]
    """Living ranks, ascending: a checkpoint is complete when all of them have committed it. Those
    that joined have numbers from `world_size` on."""
    step: int
    sha256: str = ""
    """Of the file of the state, in hexadecimal."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.rank < 0:
            raise ValueError(
                f"rank {self.rank} of world_size {self.world_size} cannot be: ranks count from 0"
            )
        if self.step < 0:
            raise ValueError(f"step {self.step} is negative: give the steps done so far")
        rising = all(one < other for one, other in itertools.pairwise(self.members))
        if not rising or min(self.members, default=0) < 0:
            raise ValueError(
                f"members {list(self.members)} are not ranks: give each living one once, ascending"
            )
        if self.rank not in self.members:
            raise ValueError(f"rank {self.rank} is not among members {list(self.members)}")

    def text(self) -> str:
        """The manifest as it is written."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @property
    def common(self) -> tuple[str, int, tuple[int, ...]]:
        """What the parts of one checkpoint have in common."""
        return self.run, self.world_size, self.members


def step_folder(directory: Path, step: int) -> Path:
    """The folder of one step."""
    return directory / f"step-{step:09d}"


def state_path(directory: Path, step: int, rank: int) -> Path:
    """The file of one rank's state."""
    return step_folder(directory, step) / f"rank-{rank:04d}.pt"


def manifest_path(directory: Path, step: int, rank: int) -> Path:
    """The file that commits one rank's state."""
    return state_path(directory, step, rank).with_suffix(".json")


def step_folders(directory: Path) -> list[tuple[int, Path]]:
    """Steps of which there is a folder, in order; symbolic links are none."""
    try:
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((_STEP.fullmatch(p.name), p) for p in paths if p.is_dir() and not p.is_symlink())
    return sorted((int(match[1]), path) for match, path in found if match)


def own_files(folder: Path) -> list[tuple[int, Path]]:
    """Files of checkpoints in the folder of a step, with their ranks; manifests first."""
    # In the order of removal: a kill in between leaves no commit without a state.
    try:
        paths = sorted(folder.iterdir(), key=lambda path: (path.suffix != ".json", path.name))
    except FileNotFoundError:
        return []
    found = ((_FILE.fullmatch(path.name), path) for path in paths)
    return [(int(match[1]), path) for match, path in found if match]


def read_manifest(directory: Path, step: int, rank: int) -> Manifest | None:
    """Read the manifest of a rank's part of a step; None if there is none."""
    path = manifest_path(directory, step, rank)
    try:
        value = json.loads(path.read_text("utf-8"))
        read = Manifest(**value | {"members": tuple(value["members"])})
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, it is no manifest ({error}): remove {path.parent} to go back to "
            "the step before"
        ) from error
    if (read.rank, read.step) != (rank, step):
        raise ValueError(
            f"{path} was written by rank {read.rank} at step {read.step}: files cannot be moved "
            f"from one rank or step to another. Remove {path.parent} to go back to the step before"
        )
    return read


def _manifests(directory: Path, step: int) -> dict[int, Manifest]:
    """What ranks have committed of a step."""
    ranks = [r for r, path in own_files(step_folder(directory, step)) if path.suffix == ".json"]
    read = {rank: read_manifest(directory, step, rank) for rank in ranks}
    return {rank: manifest for rank, manifest in read.items() if manifest is not None}


def _missing(one: Manifest, manifests: dict[int, Manifest]) -> list[int]:
    """Members that have not committed the same checkpoint."""
    return [
        rank
        for rank in one.members
        if rank not in manifests or manifests[rank].common != one.common
    ]


def _complete(directory: Path, step: int, run: str | None) -> Manifest | None:
    """A manifest of the checkpoint that all its members have committed, if there is one."""
    manifests = _manifests(directory, step)
    whole = [m for m in manifests.values() if run in (None, m.run) and not _missing(m, manifests)]
    return max(whole, key=lambda one: len(one.members), default=None)


def latest(directory: str | PathLike[str], *, run: str | None = None) -> int | None:
    """Return the newest step that all its ranks have committed; local, reads manifests only.

    Args:
        directory: Where checkpoints lie, on a file system that all ranks share.
        run: Of this run only; None: of any.

    Returns:
        The step; None if no step is complete, or the directory does not exist.

    Raises:
        ValueError: A manifest is damaged, and no newer step is complete; the message names it.

    Example:
        >>> latest("nowhere") is None
        True
    """
    return max(steps(directory, run=run), default=None)


def steps(directory: str | PathLike[str], *, run: str | None = None) -> list[int]:
    """Return the steps that all their ranks have committed, in order; as `latest`."""
    directory = Path(directory)
    whole: list[int] = []
    for step, _ in reversed(step_folders(directory)):
        try:
            if _complete(directory, step, run) is not None:
                whole.insert(0, step)
        except ValueError:
            if not whole:  # otherwise a newer one is complete
                raise
    return whole


def find(
    directory: str | PathLike[str], *, step: int | None = None, run: str | None = None
) -> Manifest:
    """Return the manifest of a complete checkpoint: its step, its ranks, and how many there were.

    Local, reads manifests only. Parts that ranks left which have died since do not count.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Of this run only; None: of any.

    Raises:
        ValueError: There is none, with what it lacks; or a manifest is damaged.
    """
    directory = Path(directory)
    found = [one for one, _ in step_folders(directory) if step in (None, one)]
    for one in reversed(found):
        if (whole := _complete(directory, one, run)) is not None:
            return whole
    what = "" if step is None else f" of step {step}"
    if not found:
        raise ValueError(
            f"there is no checkpoint{what} in {directory}; {describe_complete(directory, run)}"
        )
    manifests = _manifests(directory, found[-1])
    lacking = [_missing(m, manifests) for m in manifests.values() if run in (None, m.run)]
    lacks = "has no part of this run"
    if lacking:
        lacks = f"lacks rank {', '.join(map(str, min(lacking, key=len)))}"
    raise ValueError(
        f"no checkpoint{what} in {directory} is complete: step {found[-1]} {lacks}; "
        f"{describe_complete(directory, run)}"
    )


def manifest_of(directory: Path, rank: int, step: int | None, run: str | None) -> Manifest:
    """Return what a rank has committed, of a step or of the newest complete one."""
    step = find(directory, run=run).step if step is None else step
    path = manifest_path(directory, step, rank)
    read = read_manifest(directory, step, rank)
    if read is None:
        raise ValueError(
            f"{path} does not exist: rank {rank} has no part in the checkpoint of step {step}; "
            f"{describe_complete(directory)}"
        )
    if run not in (None, read.run):
        raise ValueError(
            f"{path} is of another run, {read.run!r}, not of {run!r}: name the directory of the "
            "run that you mean"
        )
    return read


def describe_complete(directory: Path, run: str | None = None) -> str:
    """The end of a message: the steps that can be loaded."""
    there = steps(directory, run=run)
    return f"complete are steps {', '.join(map(str, there[-5:]))}" if there else "none is complete"
