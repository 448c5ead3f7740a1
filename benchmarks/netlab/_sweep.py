"""Ends what runs in a laboratory's namespaces, and removes them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ._errors import NetlabError
from ._record import Record, alive, locked, records
from ._system import NAMESPACES, namespaces, readable, run

__all__ = ["dismantle", "end_processes", "inhabitants", "sweep"]

_DEATH_SECONDS = 5.0


def sweep() -> list[str]:
    """Removes the laboratories whose owner is dead; their names.

    Raises:
        NetlabError: If one of them does not go.
    """
    with locked():
        dead = _dead()
        for record in dead:
            dismantle(record)
        return [record.name for record in dead]


def sweep_locked() -> None:
    """The same for a caller that holds the lock; what does not go waits for the next time."""
    for record in _dead():
        with contextlib.suppress(NetlabError):
            dismantle(record)


def _dead() -> list[Record]:
    return [record for record in records() if alive(record) is False]


def dismantle(record: Record, *, keep: bool = False) -> None:
    """Kills what runs inside, removes the namespaces, then the record unless it is to `keep`.

    Raises:
        NetlabError: If a process would not die or a namespace not go; the record stays then.
    """
    left = end_processes(record.namespaces)
    for name in sorted(namespaces().intersection(record.namespaces)):
        with contextlib.suppress(NetlabError):  # gone meanwhile, or named below
            run("ip", "netns", "del", name)
    still = namespaces().intersection(record.namespaces)
    if left or still:
        raise NetlabError(
            f"laboratory {record.name} is not gone: processes {left or 'none'}, namespaces "
            f"{sorted(still) or 'none'} are left; python -m benchmarks.netlab clean tries again"
        )
    if not keep:
        record.remove()


def end_processes(names: Iterable[str]) -> list[int]:
    """Kills every process in these namespaces; those that outlived it."""
    names = tuple(names)
    deadline = time.monotonic() + _DEATH_SECONDS
    while True:
        # Again until none is found: one may have forked another meanwhile.
        handles = list(inhabitants(names))
        try:
            for _, handle in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            for _, handle in handles:
                readable(handle, deadline - time.monotonic())
        finally:
            for _, handle in handles:
                os.close(handle)
        if not handles or time.monotonic() > deadline:
            return [pid for pid, _ in handles]


def inhabitants(names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Processes in these namespaces, by number and by a handle that no other can inherit."""
    ours = set()
    for name in names:
        with contextlib.suppress(OSError):
            found = (NAMESPACES / name).stat()
            ours.add((found.st_dev, found.st_ino))
    # Never this process's own network, nor one that is named twice.
    own = Path("/proc/self/ns/net").stat()
    ours.discard((own.st_dev, own.st_ino))
    for entry in Path("/proc").iterdir() if ours else ():
        if not entry.name.isdecimal() or not _inside(entry, ours):
            continue
        try:
            handle = os.pidfd_open(int(entry.name))
        except ProcessLookupError:
            continue
        if _inside(entry, ours):  # the number may have passed on before the handle was taken
            yield int(entry.name), handle
        else:
            os.close(handle)


def _inside(entry: Path, ours: set[tuple[int, int]]) -> bool:
    try:
        found = (entry / "ns/net").stat()
    except OSError:  # dead, or a zombie
        return False
    return (found.st_dev, found.st_ino) in ours
