"""Fetch a file once: to a partial file that the next try goes on with, checked, then renamed."""

import errno
import fcntl
import http.client
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError, URLError

from gossipgrad.errors import GossipError

from ._digest import DELETE_IT
from ._transfer import append_rest, retry_after_seconds

_TIMEOUT_SECONDS = 30.0
# Tries in a row, each of which brings less than this, before the server is given up.
_TRIES = 3
_TRY_BYTES = 1 << 20
_PAUSE_SECONDS = 0.5
# As many while the server says that it is busy, each after a pause twice as long.
_BUSY_TRIES = 5
_BUSY = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_LOCK_POLL_SECONDS = 0.1
_SHOW_SECONDS = 0.2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def fetch(
    url: str,
    path: Path,
    check: Callable[[Path], object],
    *,
    way_out: str,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> None:
    """Download `url` to `path`, which exists afterwards only if `check` accepted it.

    What comes is kept in `.NAME.part` beside it, also after a lost connection or a kill, and a
    later call goes on from there. Of several processes one downloads and the others wait for it.
    On a terminal the progress is shown.

    Args:
        url: Where the file is.
        path: Where it goes; its folder is made.
        check: Raises `ValueError` on a file that is not the right one.
        way_out: What the user can do instead, for the message.
        timeout_seconds: How long the server may send next to nothing, and how long it may be busy,
            or ask to be left alone (`Retry-After`); half of how long a process that downloads the
            same file may bring nothing.

    Raises:
        GossipError: The file could not be fetched, and what has come is kept; or there is no
            space for it, or it is not the right one, and nothing is left behind.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_at(part, path, timeout_seconds) as file:
            if file is not None:
                _download_right(url, file, part, check, timeout_seconds)
                part.chmod(0o644)
                part.replace(path)
    except ValueError as error:
        cause = str(error).removesuffix(DELETE_IT)
        raise GossipError(
            f"{url} did not serve the expected file, and it was deleted: {cause}; {way_out}."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise GossipError(
                f"no space in {path.parent} for {url} ({error.strerror}), and what had come was "
                f"deleted; make room there, or {way_out}."
            ) from error
        raise GossipError(
            f"could not fetch {url} to {path.parent} ({_reason(error)}){_kept(part)}; {way_out}."
        ) from error


def _download_right(
    url: str,
    file: io.FileIO,
    part: Path,
    check: Callable[[Path], object],
    timeout_seconds: float,
) -> None:
    """Complete the file; deletes it if it turns out wrong or the disk is full."""
    resumed = file.seek(0, os.SEEK_END) > 0
    try:
        _download(url, file, timeout_seconds)
        if resumed:
            with suppress(ValueError):
                check(part)
                return
            file.truncate(0)  # its two parts may be of two versions
            _download(url, file, timeout_seconds)
        check(part)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) or error.errno in _NO_SPACE:
            part.unlink()
        raise


def _download(url: str, file: io.FileIO, timeout_seconds: float) -> None:
    tries = 0
    busy_pauses: list[float] = []
    with _shown_progress(url) as report:
        while True:
            before = file.seek(0, os.SEEK_END)
            try:
                append_rest(url, file, timeout_seconds=timeout_seconds, report=report)
                return
            except HTTPError as error:
                error.close()
                if error.code not in _BUSY:
                    raise
                busy_pauses.append(_busy_pause_seconds(error, busy_pauses, timeout_seconds))
                time.sleep(busy_pauses[-1])
            except (http.client.HTTPException, ConnectionError, TimeoutError):
                brought_bytes = file.seek(0, os.SEEK_END) - before
                tries = 1 if brought_bytes >= _TRY_BYTES else tries + 1
                if tries == _TRIES:
                    raise
                if brought_bytes >= _TRY_BYTES:
                    busy_pauses.clear()
                time.sleep(_PAUSE_SECONDS)


def _busy_pause_seconds(error: HTTPError, pauses: list[float], most_seconds: float) -> float:
    """How long to leave a busy server alone: as long as it asks for, or twice the last time.

    Raises:
        OSError: It was asked often enough, or asks for more than `most_seconds` in all.
    """
    if len(pauses) == _BUSY_TRIES - 1:
        raise OSError(f"{error}, {_BUSY_TRIES} times") from error
    pause_seconds = _PAUSE_SECONDS * 2 ** len(pauses)
    left_seconds = most_seconds - sum(pauses)
    asked_seconds = retry_after_seconds(error)
    if asked_seconds is None:
        return min(pause_seconds, left_seconds)
    if asked_seconds > left_seconds:
        raise OSError(
            f"{error}: it asks to be left alone for {asked_seconds:,.0f} s, but at most "
            f"{most_seconds:g} s are waited in all"
        ) from error
    return min(max(pause_seconds, asked_seconds), left_seconds)


@contextmanager
def _alone_at(part: Path, path: Path, timeout_seconds: float) -> Iterator[io.FileIO | None]:
    """The partial file, while no other process has it; None once `path` is there."""
    size, deadline = -1, 0.0
    while not path.is_file():
        with part.open("ab", buffering=0) as file:
            if _lock(file):
                if not _is_at(part, file):
                    continue
                if path.is_file():
                    part.unlink()
                    break
                try:
                    yield file
                finally:
                    if _is_at(part, file) and not os.fstat(file.fileno()).st_size:
                        part.unlink()
                return
            # Taken: wait for as long as the other process brings something.
            if (now_bytes := os.fstat(file.fileno()).st_size) != size:
                size, deadline = now_bytes, time.monotonic() + 2 * timeout_seconds
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"another process has had {part} for {2 * timeout_seconds:g} s and brought nothing"
            )
        time.sleep(_LOCK_POLL_SECONDS)
    yield None


def _lock(file: io.FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        # A file system without locks: two writers spoil the file, which its check finds.
    return True


def _is_at(part: Path, file: io.FileIO) -> bool:
    """Whether the file still has its name: its last owner may have renamed or deleted it."""
    try:
        return os.path.samestat(part.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _reason(error: Exception) -> str:
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _kept(part: Path) -> str:
    with suppress(OSError):
        return f"; {part.stat().st_size:,} bytes are kept, and the next try goes on from there"
    return ""


@contextmanager
def _shown_progress(url: str) -> Iterator[Callable[[int, int | None], None]]:
    """A function that shows how far a download is, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda there_bytes, total_bytes: None
        return
    last_seconds = 0.0

    def show(there_bytes: int, total_bytes: int | None) -> None:
        nonlocal last_seconds
        if time.monotonic() - last_seconds < _SHOW_SECONDS and there_bytes != total_bytes:
            return
        last_seconds = time.monotonic()
        of = "" if total_bytes is None else f" of {total_bytes / 1e6:.1f}"
        print(
            f"\rfetching {url}: {there_bytes / 1e6:.1f}{of} MB", end="", file=sys.stderr, flush=True
        )

    try:
        yield show
    finally:
        if last_seconds:
            print(file=sys.stderr)
