"""Waiting for what another thread or process brings about, and for a moment of peace."""

import time
from collections.abc import Callable

__all__ = ["quick", "until"]


def until(condition: Callable[[], object], timeout_seconds: float = 20.0) -> None:
    """Returns when `condition()` holds; fails if it does not in time.

    The time guards against hanging alone: a busy machine may hold any thread up for seconds.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s"
        time.sleep(0.002)


def quick(attempt: Callable[[], float], seconds: float) -> None:
    """Returns when `attempt()` says that it took less than so many seconds; fails if none does.

    A busy machine holds up one attempt or another; what is slow is so each time.
    """
    until(lambda: attempt() < seconds)
