"""What one process at a time may do: two that train into one place would spoil each other's."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(RuntimeError):
    """Another process is at it."""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock file `path` while the block runs, and removes it then.

    A process that dies gives the lock back, too; an empty file may stay, which holds up nobody.

    Raises:
        BusyError: Another process holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "lock"):
        ...     print("nobody else is here")
        nobody else is here
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another process holds {path}: wait until it is done, or end it"
                ) from None
            if not _is_there(path, file.fileno()):  # whoever had it has removed it since
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
