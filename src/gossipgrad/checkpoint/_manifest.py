"""The manifest: what makes the files of a rank a checkpoint."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._files import FileEntry, open_plain

__all__ = [
    "MANIFEST",
    "PARTIAL",
    "Manifest",
    "file_names",
    "impossible_rank",
    "is_own_file",
    "read_manifest",
]

MANIFEST = "manifest.json"
PARTIAL = "manifest.json.partial"
_FORMAT = "gossipgrad-checkpoint"
_VERSION = 1
_MOST_BYTES = 2**24
_FILE = re.compile(r"state(-\d+)?\.(safetensors|json)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        told = self._told()
        return json.dumps({**told, "sha256": _digest(told)}, indent=1) + "\n"

    def _told(self) -> dict[str, Any]:
        return {
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

    @property
    def whole(self) -> tuple[str, str, int, tuple[int, ...]]:
        """What the parts of one checkpoint have in common."""
        return self.run, self.attempt, self.world_size, self.members


def impossible_rank(rank: int, world_size: int) -> str:
    """What is said of a rank that cannot be."""
    return f"rank {rank} of world_size {world_size} cannot be: ranks count from 0 to world_size - 1"


def file_names(taken: Collection[str]) -> tuple[str, str]:
    """Names for the file of tensors and that of the rest, unlike those that are taken."""
    for count in itertools.count():
        suffix = f"-{count}" if count else ""
        names = f"state{suffix}.safetensors", f"state{suffix}.json"
        if not set(names) & set(taken):
            return names
    raise AssertionError


def is_own_file(name: str) -> bool:
    """Whether a name is one that files of a checkpoint have; any other is somebody else's."""
    return name in (MANIFEST, PARTIAL) or _FILE.fullmatch(name) is not None


def read_manifest(path: Path) -> Manifest:
    """Read a manifest, and believe none of it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, or of another format or version.
    """
    try:
        with open_plain(path) as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{path} is no manifest: it has more than {_MOST_BYTES:,} bytes")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(told, dict) or told.get("format") != _FORMAT:
        raise ValueError(f"{path} is foreign: it is not of the format {_FORMAT}")
    if told.get("version") != _VERSION:
        raise ValueError(
            f"{path} is of version {told.get('version')!r}, this gossipgrad reads {_VERSION}: read "
            "it with the one that wrote it"
        )
    said = told.pop("sha256", None)
    if said != _digest(told):
        raise ValueError(f"{path} was changed or damaged: its digest of itself does not fit")
    try:
        return _parsed(told)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no manifest: {error}") from error


def _parsed(told: dict[str, Any]) -> Manifest:
    files = {
        name: FileEntry(size_bytes=_whole(entry["bytes"]), sha256=_text(entry["sha256"]))
        for name, entry in told["files"].items()
    }
    if len(files) != 2 or {Path(name).suffix for name in files} != {".safetensors", ".json"}:
        raise ValueError(f"it names the files {sorted(files)}, not one of each kind")
    for name, entry in files.items():
        # Nothing outside of the folder is ever opened.
        if not _FILE.fullmatch(name) or not _DIGEST.fullmatch(entry.sha256):
            raise ValueError(f"it names the file {name!r}")
    return Manifest(
        run=_text(told["run"]),
        attempt=_text(told["attempt"]),
        rank=_whole(told["rank"]),
        world_size=_whole(told["world_size"]),
        members=tuple(map(_whole, told["members"])),
        step=_whole(told["step"]),
        files=files,
    )


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _digest(told: dict[str, Any]) -> str:
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
