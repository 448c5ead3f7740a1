"""Every group that a plan could have, with what it costs by each method."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from ._timeline import Method, cost, take_arrays

__all__ = ["Choices", "all_choices"]

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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a cost has given for the sizes that there are."""

    sizes: Sizes
    seconds: Seconds

    def __call__(self, elements: int) -> float:
        return float(self.seconds[np.searchsorted(self.sizes, elements)])


def all_choices(sizes: Sequence[int], methods: Sequence[Method]) -> tuple[Choices, list[Method]]:
    """All groups of consecutive tensors, less those by a method that another beats in both costs.

    Each cost is asked for each size once: whatever it gives the next time, all that is made of the
    choices and of the methods that come back fits together.

    Args:
        sizes: Elements of the tensors; all together fewer than 2**63.
        methods: How a group may travel.

    Returns:
        The groups, and the methods with costs as they were given.

    Raises:
        ValueError: A cost is no time.
    """
    tensors = len(sizes)
    # Narrow ones are sorted faster; one that holds -n - 1 holds n, one that holds -n need not.
    narrow = np.min_scalar_type(-tensors - 1)
    counts = np.arange(1, tensors + 1)
    stop = np.repeat(counts, counts)
    start = np.arange(stop.size) - np.repeat(np.cumsum(counts) - counts, counts)
    reached = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    distinct, place = np.unique(reached[stop] - reached[start], return_inverse=True)
    select = np.stack([_seconds(method, "select_seconds", distinct) for method in methods])
    communicate = np.stack(
        [_seconds(method, "communicate_seconds", distinct) for method in methods]
    )
    found, method = np.nonzero(_worth_it(select, communicate)[place])
    choices = Choices(
        start[found].astype(narrow),
        stop[found].astype(narrow),
        method,
        select[method, place[found]],
        communicate[method, place[found]],
    )
    return choices, [
        Method(method.name, _Asked(distinct, selecting), _Asked(distinct, communicating))
        for method, selecting, communicating in zip(methods, select, communicate, strict=True)
    ]


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
    if take_arrays(function := getattr(method, what)):
        # As floats: products of whole numbers would overflow in an array, and not outside.
        with np.errstate(all="ignore"):
            found = np.asarray(function(sizes.astype(np.float64)), np.float64)
        if found.shape == sizes.shape and np.all(np.isfinite(found) & (found >= 0)):
            return found
    return np.array([cost(method, what, elements) for elements in sizes.tolist()])
