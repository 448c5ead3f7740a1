"""Where checkpoints lie, what makes the files of a rank one, and which are complete."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ._files import FileEntry, read_plain

MANIFEST = "manifest.json"
PARTIAL = "manifest.json.partial"
TENSORS = "state.safetensors"
TREE = "state.json"
OWN_FILES = frozenset({MANIFEST, PARTIAL, TENSORS, TREE})
"""Names of the files of a checkpoint; any other is somebody else's."""
_FORMAT = "gossipgrad-checkpoint"
_VERSION = 2
_MOST_BYTES = 2**24
_DIGEST = re.compile(r"[0-9a-f]{64}")
_STEP = re.compile(r"step-(\d{9}|[1-9]\d{9,})")
_RANK = re.compile(r"rank-(\d{4}|[1-9]\d{4,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a rank has committed: whose state, of which step, in which files.

    Raises:
        ValueError: A rank, step or world size cannot be, or `rank` is not among `members`.
    """

    run: str
    """Of the run, the same over all its starts; empty if it was not named."""
    attempt: str
    """Of the start of the run; empty if it was not named."""
    rank: int
    world_size: int
    members: tuple[int, ...]
    """Ranks that were alive, in order: a checkpoint is complete when all of them have committed.
    Those who joined have numbers from `world_size` on."""
    step: int
    files: Mapping[str, FileEntry]
    """By name: that of tensors, and that of everything else."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.rank < 0:
            raise ValueError(impossible_rank(self.rank, self.world_size))
        if self.step < 0:
            raise ValueError(f"step {self.step} is negative: give the steps done so far")
        # Without a set of all ranks: their number is that of a file which anybody may have written.
        rising = all(one < other for one, other in itertools.pairwise(self.members))
        if not rising or min(self.members, default=0) < 0:
            raise ValueError(
                f"members {list(self.members)} are no ranks: give each living one once, in order"
            )
        if self.rank not in self.members:
            raise ValueError(f"rank {self.rank} is not among members {list(self.members)}")

    def text(self) -> str:
        """As it is written, with a digest of itself."""
        value: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "run": self.run,
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "members": list(self.members),
            "step": self.step,
            "files": {
                name: {"bytes": entry.size_bytes, "sha256": entry.sha256}
                for name, entry in self.files.items()
            },
        }
        return json.dumps({**value, "sha256": _digest(value)}, indent=1) + "\n"

    @property
    def whole(self) -> tuple[str, str, int, tuple[int, ...]]:
        """What the parts of one checkpoint have in common."""
        return self.run, self.attempt, self.world_size, self.members


def impossible_rank(rank: int, world_size: int) -> str:
    """The message for a rank that cannot be."""
    return f"rank {rank} of world_size {world_size} cannot be: ranks count from 0 to world_size - 1"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, and believe none of it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, or of another format or version.
    """
    text = read_plain(path, _MOST_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError(f"{path} is foreign: it is not of the format {_FORMAT}")
    version = value.get("version")
    if version != _VERSION:
        writer = "an earlier gossipgrad 0.1" if version == 1 else "another gossipgrad"
        raise ValueError(
            f"{path} is of checkpoint format {version!r}, and this version of gossipgrad reads "
            f"format {_VERSION} alone. Go on with {writer}, which wrote it, or write the model "
            "there by `gossipgrad export`, and begin with those weights here"
        )
    digest = value.pop("sha256", None)
    if digest != _digest(value):
        raise ValueError(f"{path} was changed or damaged: its digest of itself does not fit")
    try:
        return _parsed(value)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error


def _parsed(value: dict[str, Any]) -> Manifest:
    files = {
        name: FileEntry(size_bytes=_count(entry["bytes"]), sha256=_text(entry["sha256"]))
        for name, entry in value["files"].items()
    }
    # Nothing outside of the folder is ever opened.
    if set(files) != {TENSORS, TREE} or not all(
        _DIGEST.fullmatch(entry.sha256) for entry in files.values()
    ):
        raise ValueError(f"it names the files {sorted(files)}")
    return Manifest(
        run=_text(value["run"]),
        attempt=_text(value["attempt"]),
        rank=_count(value["rank"]),
        world_size=_count(value["world_size"]),
        members=tuple(map(_count, value["members"])),
        step=_count(value["step"]),
        files=files,
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def folder_of(directory: Path, step: int, rank: int) -> Path:
    """Of one rank's part of a checkpoint."""
    return directory / f"step-{step:09d}" / f"rank-{rank:04d}"


def read_part(directory: Path, step: int, rank: int) -> Manifest:
    """The manifest of a rank's part of a step.

    Raises:
        FileNotFoundError: The rank has not committed the step.
        ValueError: The manifest is damaged, of another format, or of another rank or step.
    """
    path = folder_of(directory, step, rank) / MANIFEST
    read = read_manifest(path)
    if (read.rank, read.step) != (rank, step):
        raise ValueError(
            f"{path} is foreign: it was written by rank {read.rank} at step {read.step}; files "
            "cannot be handed from one rank or step to another"
        )
    return read


def latest(directory: str | PathLike[str], *, run: str | None = None) -> int | None:
    """The newest step that all its ranks have committed; local, reads manifests only.

    A newer one is passed over of which a manifest cannot be read; `load` without a step refuses
    that, and names the file.

    Args:
        directory: Where checkpoints lie, on a file system that all ranks share.
        run: Of this run only; None: of any.

    Returns:
        The step; None if no step is complete, or the directory is not there.

    Example:
        >>> latest("nowhere") is None
        True
    """
    return max(steps(directory, run=run), default=None)


def steps(
    directory: str | PathLike[str], *, run: str | None = None, rank: int | None = None
) -> list[int]:
    """Steps of which there is a checkpoint; local, reads manifests only.

    Args:
        directory: Where checkpoints lie.
        run: Of this run only; None: of any.
        rank: None: steps that all their ranks have committed, which takes a file system that they
            share. A rank: what that one has committed, whatever others did. Ranks that share
            nothing agree on the newest step that each of them has.

    Returns:
        In order, the newest last.
    """
    directory = Path(directory)
    if rank is not None:
        own = own_steps(directory, rank)
        return [s for s, m in own.items() if isinstance(m, Manifest) and run in (None, m.run)]
    return [found.step for found in all_steps(directory) if found.complete(run)]


def manifest(
    directory: str | PathLike[str], *, rank: int, step: int | None = None, run: str | None = None
) -> Manifest:
    """What a rank has committed, without reading its state.

    Args:
        directory: Where checkpoints lie.
        rank: Whose part.
        step: Which; None: the newest that is complete.
        run: Of this run only; None: of any.

    Raises:
        ValueError: There is none, or it, or with no step a newer one, is damaged or foreign; the
            message names the file.
    """
    directory = Path(directory)
    if step is None:
        whole = newest(directory, run)
        step = whole.step
        if rank not in whole.members:
            raise ValueError(
                f"rank {rank} has no part in the newest checkpoint in {directory}, step {step} of "
                f"ranks {', '.join(map(str, whole.members))}: load one of those, or name a step"
            )
    path = folder_of(directory, step, rank) / MANIFEST
    try:
        read = read_part(directory, step, rank)
    except FileNotFoundError:
        there = steps(directory, rank=rank)
        has = f"has {', '.join(map(str, there[-5:]))}" if there else "has none at all"
        raise ValueError(
            f"{path} is not there: rank {rank} has not committed step {step}; it {has}"
        ) from None
    if run not in (None, read.run):
        raise ValueError(
            f"{path} is of another run, {read.run!r}, not of {run!r}: name the directory of the "
            "run that you mean"
        )
    return read


def members(
    directory: str | PathLike[str], *, step: int | None = None, run: str | None = None
) -> tuple[int, ...]:
    """The ranks whose states make up a checkpoint, all of which have committed it.

    Local, reads manifests only. Where some ranks had died, the parts that these may have left of
    the same step do not count.

    Args:
        directory: Where checkpoints lie.
        step: Which; None: the newest that is complete.
        run: Of this run only; None: of any.

    Raises:
        ValueError: There is none, or it is not complete, with what it lacks; or with no step, a
            newer one is damaged.
    """
    return whole_of(Path(directory), step, run).members


def whole_of(directory: Path, step: int | None, run: str | None) -> Manifest:
    """One manifest of a complete checkpoint, of a step or the newest, or why there is none."""
    if step is None:
        return newest(directory, run)
    there = {found.step: found for found in all_steps(directory)}
    if step not in there:
        has = f"there are {', '.join(map(str, there))}" if there else "there is none at all"
        raise ValueError(f"there is no checkpoint of step {step} in {directory}; {has}")
    if wholes := there[step].complete(run):
        return wholes[0]
    raise ValueError(
        f"the checkpoint of step {step} in {directory} is not complete, it "
        f"{there[step].lacks(run)}: name a step that is, or one rank for its replica"
    )


def newest(directory: Path, run: str | None) -> Manifest:
    """One manifest of the newest complete checkpoint, or why there is none.

    Raises:
        ValueError: There is none, or a newer one has a manifest that cannot be read: it may have
            been complete, so that going back behind it must be a decision.
    """
    found = all_steps(directory)
    for one in reversed(found):
        if wholes := one.complete(run):
            return wholes[0]
        if one.damaged and (there := steps(directory, run=run)):
            raise ValueError(
                f"{'; '.join(one.damaged.values())}. That is of step {one.step}, newer than any "
                f"complete one: name a step to go back to; complete are "
                f"{', '.join(map(str, there[-5:]))}"
            )
    if not found:
        raise ValueError(f"there is no checkpoint in {directory}: name a directory that has one")
    raise ValueError(
        f"no checkpoint in {directory} is complete: step {found[-1].step} {found[-1].lacks(run)}; "
        "where ranks do not share the directory, name a step that all of them have"
    )


@dataclass(kw_only=True, slots=True)
class Found:
    """What there is of one step."""

    step: int
    manifests: dict[int, Manifest] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    """Why, by rank."""

    def complete(self, run: str | None = None) -> list[Manifest]:
        """One manifest of each whole that all its members have committed; mostly one or none.

        Of a run, or of any. That of the most members comes first.
        """
        wholes = [m for m in self._wholes(run) if not self._missing(m)]
        return sorted(wholes, key=lambda whole: -len(whole.members))

    def lacks(self, run: str | None = None) -> str:
        """Why it is not complete: `lacks rank 1, 3`."""
        wholes = self._wholes(run)
        if not wholes:
            other = next(iter(self.manifests.values()), None)
            reason = "has no readable manifest" if other is None else f"is of run {other.run!r}"
        else:
            fullest = min(wholes, key=lambda m: len(self._missing(m)))
            missing = self._missing(fullest)
            reason = f"lacks rank {', '.join(map(str, missing))}"
            if foreign := [rank for rank in missing if rank in self.manifests]:
                reason += f"; the part of rank {foreign[0]} is of another start or other members"
        return "; ".join([reason, *self.damaged.values()])

    def _wholes(self, run: str | None) -> list[Manifest]:
        wholes = {m.whole: m for m in self.manifests.values()}
        return [whole for whole in wholes.values() if run in (None, whole.run)]

    def _missing(self, one: Manifest) -> list[int]:
        there = self.manifests
        return [r for r in one.members if r not in there or there[r].whole != one.whole]


def all_steps(directory: Path) -> list[Found]:
    """Every step of which any rank has something, in order."""
    found = []
    # The newest first: once that is seen to be complete, nothing is added to older ones any more.
    for step, folder in reversed(step_folders(directory)):
        one = Found(step=step)
        for rank, _ in _numbered(folder, _RANK):
            try:
                one.manifests[rank] = read_part(directory, step, rank)
            except FileNotFoundError:
                continue
            except ValueError as error:
                one.damaged[rank] = str(error)
        if one.manifests or one.damaged:
            found.append(one)
    return found[::-1]


def own_folders(directory: Path, rank: int) -> list[tuple[int, Path]]:
    """Of a rank, of all steps in order, whatever is in them."""
    folders = [(step, folder_of(directory, step, rank)) for step, _ in step_folders(directory)]
    return [
        (step, folder) for step, folder in folders if folder.is_dir() and not folder.is_symlink()
    ]


def own_steps(directory: Path, rank: int, *, since: int = 0) -> dict[int, Manifest | str | None]:
    """Steps from `since` on of which a rank has a folder, in order; None: it has not committed.

    Where its manifest cannot be read, why: that is to be left alone.
    """
    own: dict[int, Manifest | str | None] = {}
    for step, _ in own_folders(directory, rank):
        if step < since:
            continue
        try:
            own[step] = read_part(directory, step, rank)
        except FileNotFoundError:
            own[step] = None
        except ValueError as error:
            own[step] = str(error)
    return own


def step_folders(directory: Path) -> list[tuple[int, Path]]:
    """Of all steps in order, whatever is in them."""
    return _numbered(directory, _STEP)


def rank_folders(folder: Path) -> list[Path]:
    """Of all ranks that have something of a step, in order; links are none."""
    parts = [part for _, part in _numbered(folder, _RANK)]
    return [part for part in parts if part.is_dir() and not part.is_symlink()]


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    try:
        names = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(m[1]), path) for path in names if (m := pattern.fullmatch(path.name)))
