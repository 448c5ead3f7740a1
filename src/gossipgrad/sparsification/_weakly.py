"""Hooks on parameters that hold nothing."""

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["weakly"]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method as long as its object lives; then it does nothing.

    For hooks on gradients: torch keeps them where the garbage collector does not look, so what
    such a hook holds, and the parameters that this holds in turn, would never be freed.
    """
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        there = held()
        return None if there is None else there(*args)

    return call
