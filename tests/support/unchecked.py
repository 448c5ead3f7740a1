"""Types as users have them, who check none."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping

__all__ = ["types_unchecked"]


@contextmanager
def types_unchecked() -> Iterator[None]:
    """Values that annotations forbid come through inside, where jaxtyping checks otherwise."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
