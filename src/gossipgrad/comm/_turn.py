"""Whose turn it is to listen: one thread at a time, and it may serve those that wait beside it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Turn"]

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0  # a look takes half a second


class Turn:
    """Lets one thread at a time listen, until it is over for all."""

    def __init__(self) -> None:
        self.over = False
        self._changed = threading.Condition()
        self._owner: int | None = None  # the thread whose turn it is

    @contextmanager
    def take(self, served: Callable[[], bool], timeout_seconds: float) -> Iterator[bool]:
        """Inside, it is this thread's turn, if it got it in time and `served()` does not hold."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._owner is None or self.over or served(), timeout_seconds
            )
            mine = not (self._owner is not None or self.over or served())
            if mine:
                self._owner = threading.get_ident()
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._owner = None
                    self._changed.notify_all()

    def end(self) -> bool:
        """Lets nobody listen any more; whether nobody does.

        Waits for another thread that does, at most a few seconds, and not for this one itself: a
        session that nobody closed may be collected, and so closed, in its own listener.
        """
        with self._changed:
            self.over = True
            self._changed.notify_all()
            ended = self._changed.wait_for(
                lambda: self._owner in (None, threading.get_ident()), _END_SECONDS
            )
        if not ended:
            logger.warning("a thread listens still after %g s: its links stay open", _END_SECONDS)
        return ended
