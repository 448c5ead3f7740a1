"""Refuses calls that come from a signal handler."""

import inspect
import sys
from itertools import pairwise

from gossipgrad.errors import GossipError

__all__ = ["check_not_in_handler"]


def check_not_in_handler(method: str) -> None:
    """Raise `GossipError` in a signal handler, in a step or between two.

    1. The handler of one rank interrupts a step that holds the lock of its links.
    2. A collective there waits for that lock for ever, and all other ranks for this one.
    3. Another rank's handler runs between two steps: it must not wait, either.
    """
    if (handler := _signal_handler()) is not None:
        raise GossipError(
            f"{method}() in the signal handler {handler}: it may have interrupted a step. Set a "
            "flag in the handler, and call it in the training loop, after optimizer.step()"
        )


def _signal_handler() -> str | None:
    """Return the name of the signal handler that this thread is in, None outside of one.

    Python calls it with a number and the interrupted frame, which is its caller; a debugger
    without.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        values: list[object] = []
        for name in code.co_varnames[:count]:
            value = frame.f_locals.get(name)
            values += value if isinstance(value, tuple) else (value,)
        for number, interrupted in pairwise(values):
            if interrupted is frame.f_back and isinstance(number, int):
                return code.co_qualname
        frame = frame.f_back
    return None
