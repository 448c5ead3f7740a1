"""Every group that a plan could have, with what it costs by each method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ._timeline import Method, cost

__all__ = ["Choices", "all_choices"]

_SPOT_CHECKS = 8
_SAME = 1e-9  # relative: a function may round otherwise in an array

Sizes = Int[np.ndarray, " size"]
Seconds = Float[np.ndarray, " size"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Groups that a plan may have: tensors `start` to `stop - 1` by a method, sorted by `stop`.

    Attributes:
        start: First tensor of each.
        stop: First tensor past each.
        method: Place of its method.
        select: Seconds on the clock of backward.
        communicate: Seconds on the wire.
    """

    start: Int[np.ndarray, " choice"]
    stop: Int[np.ndarray, " choice"]
    method: Int[np.ndarray, " choice"]
    select: Float[np.ndarray, " choice"]
    communicate: Float[np.ndarray, " choice"]

    def only(self, which: Bool[np.ndarray, " choice"]) -> "Choices":
        """Some of them."""
        return Choices(
            self.start[which],
            self.stop[which],
            self.method[which],
            self.select[which],
            self.communicate[which],
        )


def all_choices(sizes: Sequence[int], methods: Sequence[Method]) -> Choices:
    """All groups of consecutive tensors, less those by a method that another beats in both costs.

    Raises:
        ValueError: A cost is no time.
    """
    tensors = len(sizes)
    narrow = np.min_scalar_type(-tensors)  # sorted faster than wider ones
    counts = np.arange(1, tensors + 1)
    stop = np.repeat(counts, counts)
    start = np.arange(stop.size) - np.repeat(np.cumsum(counts) - counts, counts)
    reached = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    distinct, place = np.unique(reached[stop] - reached[start], return_inverse=True)
    costs = np.empty((2, len(methods), distinct.size))
    for number, method in enumerate(methods):
        costs[0, number] = _seconds(method, "select_seconds", distinct)
        costs[1, number] = _seconds(method, "communicate_seconds", distinct)
    found, method = np.nonzero(_worth_it(*costs)[place])
    return Choices(
        start[found].astype(narrow),
        stop[found].astype(narrow),
        method,
        costs[0][method, place[found]],
        costs[1][method, place[found]],
    )


def _worth_it(
    select: Float[np.ndarray, "method size"], communicate: Float[np.ndarray, "method size"]
) -> Bool[np.ndarray, "size method"]:
    """Where no other method is as quick in both costs; of equal ones the first is."""
    kept = np.ones(select.shape, bool)
    for one in range(len(select)):
        for other in range(len(select)):
            beaten = (select[other] <= select[one]) & (communicate[other] <= communicate[one])
            if other > one:
                beaten &= (select[other] < select[one]) | (communicate[other] < communicate[one])
            if other != one:
                kept[one] &= ~beaten
    return kept.T


def _seconds(method: Method, what: str, sizes: Sizes) -> Seconds:
    at_once = _at_once(getattr(method, what), sizes)
    if at_once is not None:
        wrong = np.flatnonzero(~(np.isfinite(at_once) & (at_once >= 0)))
        if not wrong.size:
            return at_once
        cost(method, what, int(sizes[wrong[0]]))  # tells of it
    return np.array([cost(method, what, elements) for elements in sizes.tolist()])


def _at_once(function: Callable[..., Any], sizes: Sizes) -> Seconds | None:
    """What it gives for all sizes, if it takes arrays and means them as it means numbers."""
    if sizes.size < _SPOT_CHECKS:
        return None
    try:
        # As floats: products of whole numbers would overflow in an array, and not outside.
        with np.errstate(all="ignore"):
            found = function(sizes.astype(np.float64))
    except Exception:  # whatever a function of numbers does with an array
        return None
    if not isinstance(found, np.ndarray) or found.shape != sizes.shape:
        return None
    found = found.astype(np.float64)
    for place in np.linspace(0, sizes.size - 1, _SPOT_CHECKS).astype(int).tolist():
        if not np.isclose(function(int(sizes[place])), found[place], rtol=_SAME, atol=0.0):
            return None
    return found
