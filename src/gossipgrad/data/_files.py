"""Files of data sets: where they are looked for, and how missing ones are fetched."""

import hashlib
import http.client
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import torch
from filelock import FileLock

from gossipgrad.errors import GossipError

DELETE_IT = "; delete it to fetch it anew."
_TIMEOUT_SECONDS = 30.0


def data_folders(name: str, data_dir: Path | None) -> list[Path]:
    """The folders where files of a data set are looked for, in this order.

    That is `name` in `data_dir`, in the folder that `GOSSIPGRAD_DATA` names, and in the user's
    cache (`$XDG_CACHE_HOME/gossipgrad`, `~/.cache/gossipgrad`), where there is one.
    """
    shared = os.environ.get("GOSSIPGRAD_DATA")
    roots = [data_dir, Path(shared) if shared else None, cache_dir()]
    return [root / name for root in roots if root is not None]


def cache_dir() -> Path | None:
    """The user's cache of data sets, which need not exist; None for a user without a home."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "gossipgrad"
    try:
        return Path.home() / ".cache" / "gossipgrad"
    except RuntimeError:
        return None


def find_folder(names: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """The first of `folders` that has all files of these names, None if none does."""
    wanted = list(names)
    for folder in folders:
        if all((folder / name).is_file() for name in wanted):
            return folder
    return None


def download_folder(name: str, data_dir: Path | None) -> Path:
    """Where missing files of a data set go: into `data_dir`, or into the cache when None.

    Raises:
        GossipError: There is neither.
    """
    root = cache_dir() if data_dir is None else data_dir
    if root is None:
        raise GossipError(
            f"{name}/ has to be fetched, but this user has no home folder to keep it in; name a "
            "folder with --data-dir or XDG_CACHE_HOME."
        )
    return root / name


def fetch(url: str, path: Path, check: Callable[[Path], object], *, what: str) -> None:
    """Download `url` to `path`, which exists afterwards only if `check` accepted the content.

    Of several processes one downloads, and the others wait for it.

    Args:
        url: Where the file is.
        path: Where it goes; its folder is made, and bears the name of the data set.
        check: Raises `ValueError` on a file that is not the right one.
        what: What the user can put there instead, for the message.

    Raises:
        GossipError: The file could not be fetched, has sent nothing for 30 s, or is not the right
            one; nothing is left behind.
    """
    instead = (
        f"put {what} into {path.parent}, or name the folder that has them in its "
        f"{path.parent.name}/ with --data-dir or GOSSIPGRAD_DATA."
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            if not path.is_file():
                _download(url, path, check)
    except ValueError as error:
        raise GossipError(
            f"{url} did not serve the expected file, and it was deleted: "
            f"{str(error).removesuffix(DELETE_IT)}; {instead}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        reason = str(getattr(error, "reason", None) or error) or type(error).__name__
        raise GossipError(
            f"could not fetch {url} to {path.parent} ({reason}); {instead}"
        ) from error


def check_sha256(path: Path, sha256: str, *, way_out: str = DELETE_IT) -> None:
    """Raise `ValueError` if the content of a file has another SHA-256 than `sha256`; says both."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {sha256}{way_out}")


def _download(url: str, path: Path, check: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.part")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)  # torch's function takes none, and would wait
    try:
        torch.hub.download_url_to_file(url, str(part), progress=sys.stderr.isatty())
        check(part)
        part.replace(path)
    finally:
        socket.setdefaulttimeout(before)
        part.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire()
    except NotImplementedError:  # a file system without locks: each downloads, the last one stays
        yield
        return
    try:
        # What a killed download of torch's has left.
        for left in path.parent.glob(f".{path.name}.part*"):
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()
