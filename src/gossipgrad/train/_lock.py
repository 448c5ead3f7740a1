"""Whether a run lives: a lock on a file in its folder that all who take part in it share."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ._layout import RunDir

_POLL_SECONDS = 0.05
# A process that was killed may hold its lock for a moment longer.
_PATIENCE_SECONDS = 1.0


@contextmanager
def hold_lock(run_dir: RunDir, *, first: bool = False) -> Iterator[None]:
    """Share the lock of a run, so that no other command replaces or resumes it.

    The system frees it when a process ends, however it does; the file stays, and alone says
    nothing. Where files cannot be locked nobody is kept out.
    """
    try:
        file = run_dir.lock.open("a")
    except OSError:  # not ours to write
        yield
        return
    with file:
        if not _share(file, first=first) and first:
            raise ValueError(
                f"the run in {run_dir.path} trains: a process that takes part in it holds "
                f"{run_dir.lock}. Stop it first; if it was on a machine that is gone, remove that "
                "file."
            )
        yield


def hold(path: Path) -> IO[str] | None:
    """Lock a file of this process alone until it ends, or closes it; None where that fails."""
    with suppress(OSError):
        file = path.open("a")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    return None


def is_held(path: Path) -> bool | None:
    """Whether a process holds a file that it has locked by `hold`; None if there is no such file.

    True where files cannot be locked: then nobody is known to be dead.
    """
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return None
    except OSError:
        return True


def _share(file: IO[str], *, first: bool) -> bool:
    """Lock a file for all who share it; False if somebody is in the way and does not leave."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with suppress(BlockingIOError):
            try:
                if first:  # all who take part would be in the way of this
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # a file system without locks
                pass
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
