"""Every group that a plan could have, with what it costs by each method."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ._timeline import Method, cost

__all__ = ["Choices", "all_choices", "cost_the_same", "one_by_one"]

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


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """A cost that refuses arrays, whatever it would do with them."""

    function: Callable[..., Any]

    def __call__(self, elements: Any) -> Any:
        if isinstance(elements, np.ndarray):
            raise TypeError("one size at a time")
        return self.function(elements)


def one_by_one(method: Method) -> Method:
    """The same method, whose costs are asked for each size by itself."""
    return Method(
        method.name, _OneByOne(method.select_seconds), _OneByOne(method.communicate_seconds)
    )


def all_choices(
    sizes: Sequence[int], methods: Sequence[Method], known: Sequence[int] = ()
) -> Choices:
    """All groups of consecutive tensors, less those by a method that another beats in both costs.

    Args:
        sizes: Elements of the tensors; all together fewer than 2**63.
        methods: How a group may travel.
        known: Elements of groups whose costs have to be those of each by itself.

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
    costs = np.empty((2, len(methods), distinct.size))
    for number, method in enumerate(methods):
        costs[0, number] = _seconds(method, "select_seconds", distinct, known)
        costs[1, number] = _seconds(method, "communicate_seconds", distinct, known)
    found, method = np.nonzero(_worth_it(*costs)[place])
    return Choices(
        start[found].astype(narrow),
        stop[found].astype(narrow),
        method,
        costs[0][method, place[found]],
        costs[1][method, place[found]],
    )


def cost_the_same(
    choices: Choices, chosen: Sequence[int], sizes: Sequence[int], methods: Sequence[Method]
) -> bool:
    """Whether these cost, each asked for by itself, what they did when all were asked for."""
    for at in chosen:
        method, elements = (
            methods[choices.method[at]],
            sum(sizes[choices.start[at] : choices.stop[at]]),
        )
        if not (
            _same(cost(method, "select_seconds", elements), choices.select[at])
            and _same(cost(method, "communicate_seconds", elements), choices.communicate[at])
        ):
            return False
    return True


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


def _seconds(method: Method, what: str, sizes: Sizes, known: Sequence[int]) -> Seconds:
    at_once = _at_once(method, what, sizes, known)
    if at_once is not None:
        wrong = np.flatnonzero(~(np.isfinite(at_once) & (at_once >= 0)))
        if not wrong.size:
            return at_once
        cost(method, what, int(sizes[wrong[0]]))  # tells of it
    return np.array([cost(method, what, elements) for elements in sizes.tolist()])


def _at_once(method: Method, what: str, sizes: Sizes, known: Sequence[int]) -> Seconds | None:
    """What it gives for all sizes, if it takes arrays and means them as it means numbers.

    Raises:
        ValueError: What it gives for one size is no time.
    """
    if sizes.size < _SPOT_CHECKS:
        return None
    try:
        # As floats: products of whole numbers would overflow in an array, and not outside.
        with np.errstate(all="ignore"):
            found = getattr(method, what)(sizes.astype(np.float64))
        if not isinstance(found, np.ndarray) or found.shape != sizes.shape:
            return None
        found = found.astype(np.float64)
    except Exception:  # whatever a function of numbers does with an array
        return None
    spots = np.linspace(0, sizes.size - 1, _SPOT_CHECKS).astype(int).tolist()
    for place in spots + np.searchsorted(sizes, np.array(known, np.int64)).tolist():
        if not _same(cost(method, what, int(sizes[place])), found[place]):
            return None
    return found


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME)
