"""Ctrl-C and SIGTERM as a wish to stop, not as an exception."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stops:
    """The signals caught so far, the first one first."""

    def __init__(self) -> None:
        self.caught: list[signal.Signals] = []

    @property
    def first(self) -> signal.Signals | None:
        """What asked for the stop, None if nothing did."""
        return self.caught[0] if self.caught else None

    @property
    def insisted(self) -> bool:
        """Whether a second signal asks to stop at once."""
        return len(self.caught) > 1


@contextmanager
def catch_stops(on_stop: Callable[[], None] | None = None) -> Iterator[Stops]:
    """Collect SIGINT and SIGTERM inside the block; outside, all is as it was.

    Outside the main thread Python delivers no signals, and nothing is caught.

    Args:
        on_stop: Called on each signal, between two instructions of the main thread.
    """
    stops = Stops()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return

    def note(number: int, frame: FrameType | None) -> None:
        stops.caught.append(signal.Signals(number))
        if on_stop is not None:
            on_stop()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
