"""Where checkpoints lie, what a rank has committed, and which steps are complete."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

_FORMAT = "gossipgrad-checkpoint"
_VERSION = 3
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
    size_bytes: int = 0
    """Of the file of the state."""
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
        """The manifest as it is written, with a digest of itself."""
        value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        value |= {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**value, "digest": _digest(value)}, indent=1) + "\n"

    @property
    def common(self) -> tuple[str, int, tuple[int, ...]]:
        """What the parts of one checkpoint have in common."""
        return self.run, self.world_size, self.members


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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


def read_manifest(directory: Path, step: int, rank: int) -> Manifest:
    """Read the manifest of a rank's part of a step."""
    path = manifest_path(directory, step, rank)
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it cannot be read as JSON ({error})") from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError(f"{path} is not of the format {_FORMAT}")
    if value.get("version") != _VERSION:
        raise ValueError(
            f"{path} is of checkpoint format {value.get('version')!r}, and this version of "
            f"gossipgrad reads format {_VERSION} alone: continue with the version that wrote it, "
            "or export the model there and begin with those weights here"
        )
    digest = value.pop("digest", None)
    if digest != _digest(value):
        raise ValueError(f"{path} was changed or damaged: its digest does not fit")
    try:
        values = {field.name: value[field.name] for field in fields(Manifest)}
        read = Manifest(**values | {"members": tuple(values["members"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a manifest: {error}") from error
    if (read.rank, read.step) != (rank, step):
        raise ValueError(
            f"{path} was written by rank {read.rank} at step {read.step}: files cannot be moved "
            "from one rank or step to another"
        )
    return read


class Step:
    """What there is of one step: readable manifests by rank, and why others cannot be read."""

    def __init__(self, directory: Path, step: int) -> None:
        self.step = step
        self.manifests: dict[int, Manifest] = {}
        self.damaged: dict[int, str] = {}
        for rank, path in own_files(step_folder(directory, step)):
            if path.suffix != ".json":
                continue
            try:
                self.manifests[rank] = read_manifest(directory, step, rank)
            except FileNotFoundError:
                continue  # removed by its rank just now
            except ValueError as error:
                self.damaged[rank] = str(error)

    def complete(self, run: str | None = None) -> Manifest | None:
        """A manifest of the checkpoint that all its members have committed, if there is one."""
        whole = [m for m in self._candidates(run) if not self._missing(m)]
        return max(whole, key=lambda one: len(one.members), default=None)

    def lacks(self, run: str | None = None) -> str:
        """Why it is not complete: `lacks rank 1, 3`."""
        candidates = self._candidates(run)
        if not candidates:
            other = next(iter(self.manifests.values()), None)
            reason = "has no readable manifest" if other is None else f"is of run {other.run!r}"
        else:
            missing = min(map(self._missing, candidates), key=len)
            reason = f"lacks rank {', '.join(map(str, missing))}"
        return "; ".join([reason, *self.damaged.values()])

    def _candidates(self, run: str | None) -> list[Manifest]:
        found = {m.common: m for m in self.manifests.values()}
        return [one for one in found.values() if run in (None, one.run)]

    def _missing(self, one: Manifest) -> list[int]:
        there = self.manifests
        return [r for r in one.members if r not in there or there[r].common != one.common]


def latest(directory: str | PathLike[str], *, run: str | None = None) -> int | None:
    """Return the newest step that all its ranks have committed; local, reads manifests only.

    A newer step of which a manifest cannot be read is passed over. `load` without a step refuses
    that, and names the file.

    Args:
        directory: Where checkpoints lie, on a file system that all ranks share.
        run: Of this run only; None: of any.

    Returns:
        The step; None if no step is complete, or the directory does not exist.

    Example:
        >>> latest("nowhere") is None
        True
    """
    return max(steps(directory, run=run), default=None)


def steps(directory: str | PathLike[str], *, run: str | None = None) -> list[int]:
    """Return the steps that all their ranks have committed, in order; as `latest`."""
    directory = Path(directory)
    found = [Step(directory, step) for step, _ in step_folders(directory)]
    return [one.step for one in found if one.complete(run) is not None]


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
        ValueError: There is none, with what it lacks; or with no step, a newer one has a manifest
            that cannot be read: it may have been complete, so going back must be a decision.
    """
    directory = Path(directory)
    found = [Step(directory, one) for one, _ in step_folders(directory)]
    if step is not None:
        found = [one for one in found if one.step == step]
    complete = describe_complete(directory, run)
    for one in reversed(found):
        if (whole := one.complete(run)) is not None:
            return whole
        if step is None and one.damaged and steps(directory, run=run):
            raise ValueError(
                f"{'; '.join(one.damaged.values())}. That is of step {one.step}, newer than any "
                f"complete one: name a step to go back to; {complete}"
            )
    what = "" if step is None else f" of step {step}"
    if not found:
        raise ValueError(f"there is no checkpoint{what} in {directory}; {complete}")
    raise ValueError(
        f"no checkpoint{what} in {directory} is complete: step {found[-1].step} "
        f"{found[-1].lacks(run)}; {complete}"
    )


def manifest_of(directory: Path, rank: int, step: int | None, run: str | None) -> Manifest:
    """Return what a rank has committed, of a step or of the newest complete one."""
    if step is None:
        whole = find(directory, run=run)
        step = whole.step
        if rank not in whole.members:
            raise ValueError(
                f"rank {rank} has no part in the newest checkpoint in {directory}, step {step} of "
                f"ranks {', '.join(map(str, whole.members))}: load one of those, or name a step"
            )
    path = manifest_path(directory, step, rank)
    try:
        read = read_manifest(directory, step, rank)
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist: rank {rank} has not committed step {step}; "
            f"{describe_complete(directory)}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{error}; {describe_complete(directory)}") from error
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
