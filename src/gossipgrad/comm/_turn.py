"""Whose turn it is to listen: one thread at a time, and it may serve those that wait beside it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Turn"]


class Turn:
    """Lets one thread at a time listen, until it is over for all."""

    def __init__(self) -> None:
        self.over = False
        self._changed = threading.Condition()
        self._taken = False

    @contextmanager
    def take(self, served: Callable[[], bool], timeout_seconds: float) -> Iterator[bool]:
        """Inside, it is this thread's turn, if it got it in time and `served()` does not hold."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or self.over or served(), timeout_seconds
            )
            mine = not (self._taken or self.over or served())
            self._taken |= mine
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._taken = False
                    self._changed.notify_all()

    @contextmanager
    def end(self) -> Iterator[None]:
        """Inside, nobody listens, and nobody will any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken)
            self.over = True
            yield
