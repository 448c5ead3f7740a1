"""Where the files of a data set are looked for, and where missing ones go."""

import os
from collections.abc import Iterable
from pathlib import Path

from gossipgrad.errors import GossipError


def places(folder: str, data_dir: Path | None) -> list[Path]:
    """Where the files of a data set may lie, in the order in which they are looked for.

    That is `folder` in `data_dir`, in the folder that `GOSSIPGRAD_DATA` names, and in the user's
    cache (`$XDG_CACHE_HOME/gossipgrad`, `~/.cache/gossipgrad`), where there is one.
    """
    shared = os.environ.get("GOSSIPGRAD_DATA")
    roots = [data_dir, Path(shared) if shared else None, cache_dir()]
    return [root / folder for root in roots if root is not None]


def cache_dir() -> Path | None:
    """The user's cache of data sets, which need not exist; None for a user without a home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "gossipgrad"
    try:
        return Path.home() / ".cache" / "gossipgrad"
    except RuntimeError:
        return None


def place_with(names: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """The first of `folders` that holds all files of these names, None if none does."""
    wanted = list(names)
    for folder in folders:
        if all((folder / name).is_file() for name in wanted):
            return folder
    return None


def place_to_fetch_to(folder: str, data_dir: Path | None) -> Path:
    """Where missing files go: into `data_dir`, or into the cache when None.

    Raises:
        GossipError: There is neither.
    """
    root = cache_dir() if data_dir is None else data_dir
    if root is None:
        raise GossipError(
            f"{folder}/ has to be fetched, but this user has no home folder to keep it in; name a "
            "folder with --data-dir or XDG_CACHE_HOME."
        )
    return root / folder


def way_out(what: str, folder: str, target: Path) -> str:
    """How a user provides files by hand, for a message."""
    return (
        f"put {what} into {target}, or name the folder that has them in its {folder}/ with "
        "--data-dir or GOSSIPGRAD_DATA"
    )
