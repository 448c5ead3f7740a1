"""Checks of group settings."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["check_fraction", "check_sizes"]


def check_fraction(group: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` unless a setting is None or from 0 to below 1."""
    value = group[name]
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to below 1, or None")


def check_sizes(group: Mapping[str, Any], *names: str) -> None:
    """Raise `ValueError` for settings that are not positive and finite, or an invalid `max_dim`."""
    for name in names:
        value = group[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if name == "max_dim" and not (is_whole and value >= 1):
            raise ValueError(f"{name}={value!r} must be a whole number from 1")
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a positive number")
