"""What errors of torch have to say to a user."""

import re

__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """Its message, less the place in Gloo's source, Gloo's parting words, and the stack."""
    line = str(error).strip().split("\n", 1)[0].split(" This is typically")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line)
