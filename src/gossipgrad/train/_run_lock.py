"""A lock on a run: held by whoever puts it together, and gone with the process that holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ._layout import RunDir


@contextmanager
def run_lock(run_dir: RunDir) -> Iterator[bool]:
    """Tries to hold the lock inside; gives whether it does. Does not wait.

    On a file system without locks a file stands for it, which one who is killed leaves behind:
    nobody else puts the run together then.
    """
    try:
        file = (run_dir.partial / "lock").open("w")
    except OSError:
        yield False
        return
    with file:
        is_held, has_locks = False, True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            pass
        except OSError:
            has_locks = False
            with suppress(OSError):
                (run_dir.partial / "taken").touch(exist_ok=False)
                is_held = True
        try:
            yield is_held
        finally:
            if is_held and not has_locks:
                (run_dir.partial / "taken").unlink(missing_ok=True)
