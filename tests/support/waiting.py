"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable

__all__ = ["HANG_SECONDS", "NEVER_SECONDS", "until"]

HANG_SECONDS = 240.0
"""What has not happened by then never will. No shorter time says so: a busy machine may hold any
thread up for a minute."""

NEVER_SECONDS = 10_000.0
"""A limit that must not be what ends a wait: a test in which it does hangs, and fails."""


def until(condition: Callable[[], object], timeout_seconds: float = HANG_SECONDS) -> None:
    """Returns when `condition()` holds; fails if it hangs."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s"
        time.sleep(0.002)
