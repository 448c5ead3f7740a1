"""The manifest: what makes the files of a rank a checkpoint."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
            f"{path} is of checkpoint format {version!r}, which {writer} writes; this one reads "
            f"format {_VERSION}: go on with the one that wrote it, or export the model there"
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
