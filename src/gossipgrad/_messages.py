"""What errors of torch have to say to a user, and how this library's warnings are shown."""

import logging
import re
import sys

__all__ = ["first_line", "show_warnings"]


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
