"""Numbers that have to be whole."""

from numbers import Integral

__all__ = ["check_count", "is_whole"]


def is_whole(value: object) -> bool:
    """Whether it is a whole number, not one that happens to be round, such as 1.0."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(count: object, numel: int) -> None:
    """Raises `ValueError` if it is no number of values, whatever `numel` values these are of."""
    if not is_whole(count):
        raise ValueError(
            f"count is {count!r}: give a whole number of values, such as "
            f"max(1, int(density * {numel}))"
        )
