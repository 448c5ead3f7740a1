"""Whether the current call comes from a signal handler."""

import inspect
import sys

__all__ = ["signal_handler"]


def signal_handler() -> str | None:
    """Return the name of the signal handler that this thread is in, None outside of one.

    Python calls a handler with the interrupted frame, which is also its caller. No other function
    has its caller's frame as an argument.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        for name in code.co_varnames[:count]:
            value = frame.f_locals.get(name)
            values = value if isinstance(value, tuple) else (value,)
            if any(each is frame.f_back for each in values):
                return code.co_qualname
        frame = frame.f_back
    return None
