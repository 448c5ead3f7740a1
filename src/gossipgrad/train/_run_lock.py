"""A lock on a run: held by whoever puts it together, and gone with the process that holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from ._layout import RunDir


@contextmanager
def run_lock(run_dir: RunDir) -> Iterator[bool]:
    """Tries to hold the lock inside; gives whether it does. Does not wait."""
    try:
        file = (run_dir.partial / "lock").open("w")
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
