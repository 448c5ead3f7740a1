"""One transfer over HTTP: what a file lacks is asked for, and comes within bounded time."""

import email.utils
import errno
import io
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPResponse

_CHUNK_BYTES = 1 << 16
# A server slower than this is as good as dead: an hour for 3.6 MB.
_LEAST_BYTES_PER_SECOND = 1000


def append_rest(
    url: str,
    file: io.FileIO,
    *,
    timeout_seconds: float,
    report: Callable[[int, int | None], None],
) -> None:
    """Append to `file` what it lacks of the content at `url`.

    A server that knows no ranges, or has less than the file, sends all and the file starts anew.

    Args:
        url: An address of HTTP or HTTPS.
        file: Open for appending, unbuffered.
        timeout_seconds: How long the server may send next to nothing.
        report: Takes the bytes there and the bytes expected, after each chunk.

    Raises:
        OSError: The server cannot be reached or refuses (`urllib.error.URLError`), has stalled
            (`TimeoutError`) or left early (`ConnectionError`); the file keeps what has come. Or
            the disk is full.
    """
    offset = file.seek(0, os.SEEK_END)
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        response = _open(url, headers, timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if not offset or error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if error.headers.get("Content-Range", "") == f"bytes */{offset}":
            return
        response = _open(url, {}, timeout_seconds)
    with response:
        continues = response.status == HTTPStatus.PARTIAL_CONTENT and re.match(
            rf"bytes {offset}-", response.headers.get("Content-Range", "")
        )
        if offset and not continues:
            file.truncate(offset := 0)
        rest = response.headers.get("Content-Length")
        total = None if rest is None else offset + int(rest)
        if total is not None:
            _check_space(file, total - offset)
        _copy(response, file, total, timeout_seconds, report)


def retry_after_seconds(error: urllib.error.HTTPError) -> float | None:
    """How long a server asks to be left alone, by its `Retry-After`; None if it does not say."""
    asked = error.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", asked):
        return float(asked)
    try:
        until = email.utils.parsedate_to_datetime(asked)
    except ValueError:
        return None
    return max(0.0, until.timestamp() - time.time())


def _open(url: str, headers: dict[str, str], timeout_seconds: float) -> HTTPResponse:
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=timeout_seconds)


def _copy(
    response: HTTPResponse,
    file: io.FileIO,
    total: int | None,
    timeout_seconds: float,
    report: Callable[[int, int | None], None],
) -> None:
    there = file.seek(0, os.SEEK_END)
    window_start, window_bytes = time.monotonic(), 0
    while chunk := response.read1(_CHUNK_BYTES):
        rest = memoryview(chunk)
        while rest:  # a full disk first takes a part
            rest = rest[file.write(rest) :]
        there += len(chunk)
        window_bytes += len(chunk)
        report(there, total)
        seconds = time.monotonic() - window_start
        if seconds > timeout_seconds:
            if window_bytes < _LEAST_BYTES_PER_SECOND * seconds:
                raise TimeoutError(f"only {window_bytes:,} bytes came in {seconds:.0f} s")
            window_start, window_bytes = time.monotonic(), 0
    if total is not None and there < total:
        raise ConnectionError(f"the connection ended after {there:,} of {total:,} bytes")


def _check_space(file: io.FileIO, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(file.fileno()).free
    if needed_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{needed_bytes:,} bytes are needed and {free_bytes:,} are free",
        )
