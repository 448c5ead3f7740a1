"""Settings of groups that are outside their range."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["check_fractions", "check_sizes"]


def check_fractions(group: Mapping[str, Any], *names: str) -> None:
    """Raises `ValueError` for settings, or pairs of them, that are not from 0 to below 1."""
    for name in names:
        value = group[name]
        is_pair = name == "betas"
        numbers = value if is_pair else () if value is None else (value,)
        if (is_pair and len(value) != 2) or not all(0 <= number < 1 for number in numbers):
            asked = "two numbers" if is_pair else "a number"
            raise ValueError(f"{name}={value!r} must be {asked} from 0 to below 1")


def check_sizes(group: Mapping[str, Any], *names: str) -> None:
    """Raises `ValueError` for settings that are not positive and finite, or no dimension."""
    for name in names:
        value = group[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if name == "max_dim" and not (is_whole and value >= 1):
            raise ValueError(f"{name}={value!r} must be a whole number from 1")
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a positive number")
