"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], timeout_seconds: float = 3.0) -> None:
    """Returns when `condition()` holds; fails if it does not in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s"
        time.sleep(0.002)
