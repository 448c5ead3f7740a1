"""What a step computes: times and sizes of its tensors as plain numbers, checked."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

__all__ = ["checked_step", "finite"]

_TOO_MANY = 1 << 63  # elements of all tensors, which are counted in int64


def checked_step(
    backward_seconds: Sequence[float | int], sizes: Sequence[int]
) -> tuple[list[float], list[int]]:
    """The times and elements of some tensors, whatever kind of numbers they were.

    Raises:
        ValueError: They are none.
    """
    if len(backward_seconds) != len(sizes) or not len(sizes):
        raise ValueError(
            f"{len(backward_seconds)} times and {len(sizes)} sizes: give one of each a tensor, in "
            "the order of backward, for one tensor or more"
        )
    times = [_seconds(place, given) for place, given in enumerate(backward_seconds)]
    for place, reached in enumerate(accumulate(times)):
        if not math.isfinite(reached):
            raise ValueError(
                f"the times of backward up to tensor {place} add up to more than a float can hold: "
                "give seconds"
            )
    counts = [_elements(place, given) for place, given in enumerate(sizes)]
    for place, reached in enumerate(accumulate(counts)):
        if reached >= _TOO_MANY:
            raise ValueError(
                f"the tensors up to {place} have {reached} elements: all together have fewer than "
                "2**63, give the elements of each"
            )
    return times, counts


def finite(value: Any) -> float:
    """The value as a float; NaN if it is no finite number."""
    if isinstance(value, str | bytes | bytearray):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _seconds(place: int, given: Any) -> float:
    if not (seconds := finite(given)) >= 0:
        raise ValueError(
            f"backward of tensor {place} takes {given!r} seconds: give a time, finite and 0 or more"
        )
    return seconds


def _elements(place: int, given: Any) -> int:
    try:
        whole = int(given) == given and not isinstance(given, str | bytes | bytearray)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"tensor {place} has {given!r} elements: give a whole number, 1 or more")
    if given < 1:
        raise ValueError(f"tensor {place} has {given!r} elements: leave out tensors without any")
    return int(given)
