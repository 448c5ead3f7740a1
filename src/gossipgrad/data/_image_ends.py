"""Whether image files are whole, found out without decoding them."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from ._image_files import decoded

_END_MARKER = b"\xff\xd9"
# Some cameras and tools write a few bytes after the marker. Much more must not be looked at: the
# small preview in the head of a photograph has an end marker of its own.
_TAIL_BYTES = 32
# Reading is waiting, on the file system of a network above all.
_THREADS = 16
_FILES_OF_A_THREAD = 256
_MOST_BROKEN = 100
_MOST_NAMED = 3


def check_whole_images(paths: Iterable[str]) -> None:
    """Refuse image files that are cut short.

    A file with the end marker of a JPEG in its last bytes passes; all others are decoded.

    Raises:
        ValueError: Some cannot be decoded; the message names the first ones.
    """
    broken: list[tuple[str, ValueError]] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for suspects in _suspects(pool, paths):
            errors = pool.map(_error, suspects)
            pairs = zip(suspects, errors, strict=True)
            broken += [(path, error) for path, error in pairs if error is not None]
            if len(broken) >= _MOST_BROKEN:
                break
    if not broken:
        return
    message = f"{broken[0][1]}"
    if others := [path for path, _ in broken[1:]]:
        count = f"at least {len(others)}" if len(broken) >= _MOST_BROKEN else f"{len(others)}"
        dots = ", ..." if len(others) > _MOST_NAMED else ""
        message += f" So are {count} more broken: {', '.join(others[:_MOST_NAMED])}{dots}"
    raise ValueError(message) from broken[0][1]


def _suspects(pool: ThreadPoolExecutor, paths: Iterable[str]) -> Iterator[Sequence[str]]:
    """The files without an end marker, some thousands of files at a time."""
    rest = iter(paths)
    while parts := [
        part for _ in range(_THREADS) if (part := list(islice(rest, _FILES_OF_A_THREAD)))
    ]:
        yield [path for found in pool.map(_without_end, parts) for path in found]


def _without_end(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not _has_end(path)]


def _has_end(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # decoding says why
    try:
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        return _END_MARKER in os.pread(descriptor, _TAIL_BYTES, start)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _error(path: str) -> ValueError | None:
    try:
        decoded(Path(path))
    except ValueError as error:
        return error
    return None
