"""Whether a run lives: a lock that all who take part in it share, and other signs of life."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ._ending import find_living_joiner
from ._invitation import Invitation
from ._layout import RunDir

_POLL_SECONDS = 0.05
# A process that was killed may hold its lock for a moment longer.
_PATIENCE_SECONDS = 1.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@contextmanager
def hold_lock(
    run_dir: RunDir, *, first: bool = False, own_store: tuple[str, int] | None = None
) -> Iterator[None]:
    """Inside, who would replace the run or go on with it learns that it lives.

    Whoever takes part shares a lock on a file in the run's folder. The system frees it when a
    process ends, however it does: the file alone, which one that was killed leaves behind, says
    nothing. The last one to leave removes it. Where files cannot be locked nobody is kept out by
    it. Machines need not see each other's locks, so unless the run has its store on loopback and
    so is of this machine alone, its store is knocked at, and ranks that joined are looked for.

    Args:
        run_dir: The folder, which is there.
        first: Whether to refuse a run that somebody takes part in.
        own_store: Host and port of the store of the world that this process belongs to, which
            answers for no other run.

    Raises:
        ValueError: The run lives; nothing in its folder was touched.
    """
    try:
        lock = _share(run_dir.lock, first=first)
    except BlockingIOError:
        if first:
            raise ValueError(
                f"the run in {run_dir.path} trains: a process that takes part in it holds "
                f"{run_dir.lock}. Stop it first; if it was on a machine that is gone, remove that "
                "file."
            ) from None
        lock = None
    try:
        if first:
            _refuse_signs_of_life(run_dir, own_store, locked=lock is not None)
        yield
    finally:
        if lock is not None:
            _leave(run_dir.lock, lock)


def _share(path: Path, *, first: bool) -> IO[str] | None:
    """The file with a shared lock on it, if it can be locked at all.

    Raises:
        BlockingIOError: Somebody holds it already and `first` is set, or is just asking for that.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            file = path.open("a+")
        except OSError:
            return None
        try:
            if first:  # all who take part would be in the way of this
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise
        except OSError:
            file.close()
            return None
        file.close()
        time.sleep(_POLL_SECONDS)


def _is(file: IO[str], path: Path) -> bool:
    """Whether the file that was opened is still the one of that name."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _leave(path: Path, lock: IO[str]) -> None:
    with lock, suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails unless this is the last
        if _is(lock, path):
            path.unlink()


def _refuse_signs_of_life(
    run_dir: RunDir, own_store: tuple[str, int] | None, *, locked: bool
) -> None:
    invitation = None
    with suppress(ValueError):  # one that cannot be read, or is no more an invitation, says nothing
        invitation = Invitation.read(run_dir)
    store = None if invitation is None else invitation.store
    if locked and store is not None and store[0] in _LOOPBACK:
        return
    if invitation is not None and store is not None and store != own_store:
        with suppress(OSError):
            invitation.knock()
            raise ValueError(
                f"the run in {run_dir.path} trains: its store answers at {store[0]}:{store[1]}. "
                f"Stop it first; if it is another program that listens there, remove "
                f"{run_dir.invitation}."
            )
    if (rank := find_living_joiner(run_dir)) is not None:
        raise ValueError(
            f"the run in {run_dir.path} trains: rank {rank}, which joined it, shows signs of life. "
            "Stop it first."
        )
