"""What errors of torch have to say to a user, and how this library's warnings are shown."""

import contextlib
import logging
import os
import re
import sys
import warnings
from pathlib import Path

__all__ = ["first_line", "show_warnings", "warn"]

_PACKAGE = str(Path(__file__).parent) + os.sep


class _LastResort(logging.Handler):
    """As `logging.lastResort`: for programs that set up no logging, and says who speaks."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)  # as it is now, wherever that leads


def show_warnings() -> None:
    """Lets the warnings of this library begin with its name where no logging is set up."""
    handler = _LastResort()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("gossipgrad: %(message)s"))
    logging.getLogger("gossipgrad").addHandler(handler)


def first_line(error: BaseException) -> str:
    """Its message, less the place in Gloo's source, Gloo's parting words, and the stack."""
    line = str(error).strip().split("\n", 1)[0].split(" This is typically")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line)


def warn(message: str) -> None:
    """Issue a `UserWarning` that names the line of the user's program, and not one in here.

    That is the innermost line outside of this package, of torch, whose hooks call it, and of
    context managers.
    """
    inside = [_PACKAGE, contextlib.__file__]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        inside.append(str(Path(torch.__file__).parent) + os.sep)
    of_caller = frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(tuple(inside)):
        frame = frame.f_back
    frame = frame or of_caller  # in a thread of the package
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
