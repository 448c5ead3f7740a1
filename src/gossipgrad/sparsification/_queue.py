"""A queue of collectives, in the same order on all ranks, on a separate thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from time import perf_counter

from gossipgrad.errors import GossipError

__all__ = ["OrderedQueue", "Ticket"]


class Ticket:
    """One entry of the queue, with its result and times."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.began_seconds = self.ended_seconds = 0.0
        self._work = work
        self._done = threading.Event()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until it is done, with a timeout; the caller checks `error`."""
        self._done.wait(timeout_seconds)

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Do the work, unless an earlier entry failed; return the error of either."""
        self.began_seconds = perf_counter()
        try:
            if broken is not None:
                raise broken
            self._work()
        except BaseException as error:
            self.error = error
        self.ended_seconds = perf_counter()
        self._done.set()
        return self.error


class OrderedQueue:
    """Runs its entries one after another; after one fails, all later ones fail."""

    # Collectives are matched by their order alone, and which gradient is ready first differs from
    # rank to rank: all go through one queue, in the order of the plan. After one that failed the
    # ranks need not be at the same entry any more, so there is no next.

    def __init__(self, name: str) -> None:
        self._name = name
        self._entries: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._over = threading.Event()

    def put(self, ticket: Ticket) -> None:
        """Add an entry without waiting; local. After `close` it fails with a `GossipError`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._entries, self._over), name=self._name, daemon=True
            )
            self._thread.start()
        self._entries.put(ticket)
        # No lock: a signal handler may close in the middle of this. The thread sets `over` before
        # its last check, so either it sees this entry, or this sees `over`.
        if self._over.is_set():
            _refuse(self._entries)

    def close(self) -> None:
        """End the thread after the entries are done, without waiting for it."""
        if not self._closed:
            self._closed = True
            self._entries.put(None)


def _run(entries: "queue.SimpleQueue[Ticket | None]", over: threading.Event) -> None:
    broken: BaseException | None = None
    while (ticket := entries.get()) is not None:
        broken = ticket.run(broken) or broken
        del ticket  # while waiting, keep no reference to the last
    over.set()
    _refuse(entries)


def _refuse(entries: "queue.SimpleQueue[Ticket | None]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            if (ticket := entries.get_nowait()) is not None:
                ticket.run(GossipError("the session was closed before this was sent"))
