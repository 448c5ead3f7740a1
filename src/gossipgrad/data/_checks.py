"""Checks of numbers that users give."""

from numbers import Integral


def check_whole(least: int, **values: object) -> None:
    """Raise `ValueError` for a value that is no whole number, or less than `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least {least}."
            )
