"""The plan that finishes first, by a shortest path with two lengths over fronts of states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
from jaxtyping import Float, Int

from ._method import Method, checked_step, costs
from ._plan import Merge, Plan, planned
from ._rules import mg_wfbp, omgs_greedy, single, wfbp

__all__ = ["plan"]

_WIDTHS = (4, 32, 256)  # number of states kept per front, by pass
_MANY_TENSORS = 320  # above this the widest pass would take seconds

Seconds = Float[np.ndarray, "..."]
Places = Int[np.ndarray, " state"]


def plan(
    backward_seconds: Sequence[float | int], sizes: Sequence[int], methods: Sequence[Method]
) -> Plan:
    """Return the groups with methods that finish first.

    The model of time: one thread computes the gradients, in their order, and after the last one of
    a group selects what of it travels; groups travel one after another, each once it is selected.

    A plan of the first tensors is a state of two times: selection so far, and when communication so
    far ends. One that is worse in both than another is never part of the best plan; the others are
    a front. Fronts are extended by each group that may come next. States that cannot finish before
    the best plan that is known are left out. Where no front has more states than are kept, the plan
    is exact, up to rounding; otherwise the fronts keep states spread over their length, and the
    plan is the best that was found. A last pass then keeps states that are better than all that
    they stand for: no plan finishes earlier than its result.

    Time and memory grow with the square of the tensors.

    Args:
        backward_seconds: Of each tensor, in the order in which backward finishes them: from when
            the gradient before was there until this one is.
        sizes: Their elements.
        methods: The methods to choose from.

    Returns:
        The plan, never above `wfbp`, `mg_wfbp`, `omgs_greedy` and `single` by any of the methods.
        Its `gap` is 0 where it is exact; elsewhere it is proved, and often far above the truth.

    Raises:
        ValueError: There is no tensor or no list of methods, two methods have one name, a size is
            no whole number of 1 or more, or a time, or what a method gives, is negative or not
            finite.

    Example:
        The first tensor is as large as ten of the others. The published rule merges all three; it
        is better not to hold up the first.

        >>> method = Method(
        ...     name="sparse",
        ...     select_seconds=lambda elements: 0.1 * elements,
        ...     communicate_seconds=lambda elements: 4 + 0.5 * elements,
        ... )
        >>> found = plan([1, 3, 3], [10, 1, 1], [method])
        >>> [(merge.start, merge.stop) for merge in found.groups], round(found.finish_seconds, 9)
        ([(0, 1), (1, 3)], 16.0)
        >>> round(omgs_greedy([1, 3, 3], [10, 1, 1], method).finish_seconds, 9)
        18.2
    """
    times, counts, known = checked_step(backward_seconds, sizes, methods)
    groups = _Groups.of(times, counts, methods)
    rules = (single, wfbp, mg_wfbp, omgs_greedy, partial(omgs_greedy, as_published=True))
    best = min(
        (rule(times, counts, method) for method in methods for rule in rules),
        key=lambda each: each.finish_seconds,
    )
    ahead = groups.bounds()
    widths = _WIDTHS if len(counts) <= _MANY_TENSORS else _WIDTHS[:-1]
    for width in widths:
        chosen, _, is_exact = groups.search(*ahead, best.finish_seconds, width)
        if chosen:
            merges = [Merge(start, stop, methods[at].name) for start, stop, at in chosen]
            found = planned(merges, times, counts, known)
            best = min(best, found, key=lambda each: each.finish_seconds)
        if is_exact:
            return replace(best, lower_bound_seconds=best.finish_seconds)
    _, bound, _ = groups.search(*ahead, best.finish_seconds, widths[-1], optimistic=True)
    return replace(best, lower_bound_seconds=min(bound, best.finish_seconds))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The costs of every group of consecutive tensors by every method."""

    # `select`: by method, start and stop: seconds on the thread of backward; infinite where a group
    # would not be one.

    reached: Seconds  # seconds of backward up to each boundary between tensors, from 0
    select: Seconds
    communicate: Seconds  # the same: seconds on the wire

    @classmethod
    def of(
        cls, times: Sequence[float], counts: Sequence[int], methods: Sequence[Method]
    ) -> "_Groups":
        ends = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        start, stop = np.triu_indices(len(ends), 1)
        distinct, of_pair = np.unique(ends[stop] - ends[start], return_inverse=True)
        tables = []
        for what in ("select_seconds", "communicate_seconds"):
            table = np.full((len(methods), len(ends), len(ends)), np.inf)
            for at, method in enumerate(methods):
                table[at, start, stop] = costs(method, what, distinct)[of_pair]
            tables.append(table)
        return cls(np.array([0.0, *accumulate(times)]), *tables)

    def bounds(self) -> tuple[Seconds, Seconds]:
        """From each boundary on: the least communication, and the earliest finish of the rest."""
        # The second is from the start of backward, as if nothing had been selected before.
        last = len(self.reached) - 1
        communicate, finish = np.zeros(last + 1), np.zeros(last + 1)
        for boundary in range(last - 1, -1, -1):
            after = slice(boundary + 1, None)
            later = self.communicate[:, boundary, after] + communicate[after]
            communicate[boundary] = later.min()
            ends = np.maximum(finish[after], self.reached[after] + later)
            finish[boundary] = (ends + self.select[:, boundary, after]).min()
        return communicate, finish

    def search(
        self,
        communicate: Seconds,
        finish: Seconds,
        below: float,
        width: int,
        *,
        optimistic: bool = False,
    ) -> tuple[list[tuple[int, int, int]], float, bool]:
        """The best plan that is found to finish before `below`; an empty one where none is."""
        # Groups as start, stop and index of the method; when they finish; whether no front was cut.
        # `width` states of a front are kept. If `optimistic`, these are better than those left out:
        # no plan finishes before what comes out, and it may be none.
        last, is_exact = len(self.reached) - 1, True
        # Of all states: selection so far, end of communication so far, and where they come from.
        selected, ended = np.zeros(1), np.zeros(1)
        source, method = np.full(1, -1), np.full(1, -1)
        boundary = np.zeros(1, np.int64)
        for stop in range(1, last + 1):
            select = self.select[:, boundary, stop] + selected
            end = np.maximum(ended, self.reached[stop] + select)
            end += self.communicate[:, boundary, stop]
            hopeful = end + communicate[stop] < below
            hopeful &= select + finish[stop] < below
            of, parent = np.nonzero(hopeful)
            if not of.size:
                continue
            x, y = select[of, parent], end[of, parent]
            kept = _front(x, y)
            if kept.size > width and stop < last:
                worth = np.maximum(y + communicate[stop], x + finish[stop])[kept]
                spread, least = _spread(x[kept], y[kept], worth, width)
                kept, is_exact = kept[spread], False
                if optimistic:
                    x[kept], y[kept] = least
            selected, ended = np.append(selected, x[kept]), np.append(ended, y[kept])
            source, method = np.append(source, parent[kept]), np.append(method, of[kept])
            boundary = np.append(boundary, np.full(kept.size, stop))
        arrived = np.flatnonzero(boundary == last)
        if not arrived.size:
            return [], below, is_exact
        at = int(arrived[np.argmin(ended[arrived])])
        chosen, finished = [], float(ended[at])
        while source[at] >= 0:
            before = int(source[at])
            chosen.append((int(boundary[before]), int(boundary[at]), int(method[at])))
            at = before
        return chosen[::-1], finished, is_exact


def _front(x: Seconds, y: Seconds) -> Places:
    """Return the states that no other dominates in both times, by ascending `x`."""
    order = np.lexsort((y, x))
    falling = y[order]
    least = np.minimum.accumulate(falling)
    better = np.ones(order.size, bool)
    better[1:] = falling[1:] < least[:-1]
    return order[better]


def _spread(
    x: Seconds, y: Seconds, worth: Seconds, width: int
) -> tuple[Places, tuple[Seconds, Seconds]]:
    """Return at most `width` states of a front: of each stretch the one that may finish first."""
    stretch = np.minimum((x - x[0]) / (x[-1] - x[0]) * width, width - 1).astype(np.int64)
    order = np.lexsort((worth, stretch))
    first = np.ones(order.size, bool)
    first[1:] = stretch[order][1:] != stretch[order][:-1]
    heads = np.flatnonzero(first)  # the front, too, is in the order of its stretches
    return order[heads], (x[heads], np.minimum.reduceat(y, heads))
