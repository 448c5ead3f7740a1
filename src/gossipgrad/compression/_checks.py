"""Checks of counts and densities."""

from numbers import Integral, Real
from typing import TypeGuard

__all__ = ["check_count", "check_density", "is_whole"]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer, not a float with an integer value such as 1.0."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(count: object, numel: int) -> None:
    """Raise `ValueError` unless `count` is an integer from 1 to `numel`."""
    if not is_whole(count):
        raise ValueError(
            f"count is {count!r}: give a whole number of values, such as "
            f"max(1, int(density * {numel}))"
        )
    if not 1 <= count <= numel:
        raise ValueError(f"count is {count}: of {numel} values, 1 to {numel} can be sent")


def check_density(density: object, what: str = "density") -> None:
    """Raise `ValueError` unless `density` is above 0 and at most 1; `what` names it."""
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < float(density) <= 1:
        raise ValueError(
            f"{what} is {density!r}: it is the share that is sent, above 0 and at most 1, such as "
            "0.001"
        )
