"""The plan that finishes first, with proof: bounds and plans from either end, in turns."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from ._merge_plan import Plan, planned
from ._ranges import Choices, all_choices
from ._rules import mg_wfbp, omgs_greedy, single, wfbp
from ._step import checked_step, finite
from ._sweep import Keep, knowing_nothing, sweep
from ._timeline import Group, Method, by_name

__all__ = ["plan"]

_PATIENCE = 10_000_000  # states looked at before what is within the tolerance is good enough
_ENOUGH = 90_000_000  # states looked at before it is given up
_WIDEST = 1 << 16
_ROUNDING = 1e-12
_SURE = 1e-8  # relative: more than rounding can add up to


def plan(
    backward_seconds: Sequence[float | int],
    sizes: Sequence[int],
    methods: Sequence[Method],
    *,
    tolerance: float | int = 1e-4,
) -> Plan:
    """The groups, each with its method, that finish first.

    The model of time: one thread computes the gradients, in their order, and after the last one of
    a group selects what of it travels; groups travel one after another, each once it is selected.

    This is a shortest path with two lengths, selection and communication, and neither alone tells
    which of two halves is better. So states of plans in the making are kept in fronts, in passes
    from the first gradient and from the last in turns: each pass leaves out what, by the fronts of
    the pass before it, cannot beat the best plan that is known. Passes that keep some states of
    each front, ever more of them, find plans; passes that keep convex hulls of parts of it, ever
    smaller parts, bound what any plan can do, until the two meet. Where the states that a pass may
    keep are all there are, it is a bound, too.

    Time and memory grow with the square of the tensors: 161 with three methods take some tenths of
    a second and 1,000 some seconds, and some hundreds of megabytes, on one core. Cases that are
    given up take about ten seconds.

    Args:
        backward_seconds: Of each tensor, in the order in which backward finishes them: from when
            the gradient before was there until this one is.
        sizes: Their elements.
        methods: How a group may travel.
        tolerance: By how much the plan may miss the earliest finish, relative to that. 0 is exact,
            up to rounding.

    Returns:
        The plan, never above `wfbp`, `mg_wfbp`, `omgs_greedy` and `single` by any of the methods.
        Its `gap` is proved. Where that asks for too much work, the gap is above `tolerance`, and
        the plan the best that was found.

    Raises:
        ValueError: There is no tensor or no list of methods, two methods have one name, a size is
            no whole number of 1 or more, there are 2**63 elements or more, or a time, or what a
            method gives, is negative or not finite.

    Example:
        The first tensor is as large as ten of the others. The published rule merges all three; it
        is better not to hold up the first.

        >>> method = Method(
        ...     name="sparse",
        ...     select_seconds=lambda elements: 0.1 * elements,
        ...     communicate_seconds=lambda elements: 4 + 0.5 * elements,
        ... )
        >>> found = plan([1, 3, 3], [10, 1, 1], [method])
        >>> [(group.start, group.stop) for group in found.groups], round(found.finish_seconds, 9)
        ([(0, 1), (1, 3)], 16.0)
        >>> round(omgs_greedy([1, 3, 3], [10, 1, 1], method).finish_seconds, 9)
        18.2
    """
    times, counts = checked_step(backward_seconds, sizes)
    by_name(methods)
    if not finite(tolerance) >= 0:
        raise ValueError(f"tolerance is {tolerance!r}: give a share of the time, 0 or more")
    choices, asked = all_choices(counts, methods)
    best = _best_by_rule(times, counts, asked)
    reached = np.array([0.0, *accumulate(times)])
    bound, made = float(reached[-1]), 0
    spared = math.inf  # what was left out so far, and counts in no later pass, finishes no sooner
    ahead = {forward: knowing_nothing(len(counts)) for forward in (False, True)}
    for forward, keep, width in _passes():
        below, hard_below = best.finish_seconds, best.finish_seconds / (1 + tolerance)
        if keep is Keep.BEST:  # the best that is known gets by, too
            below = hard_below = math.nextafter(below * (1 + _SURE), math.inf)
        elif keep is Keep.MEMBERS:  # any better plan makes what follows cheaper
            hard_below = below
        swept = sweep(
            choices,
            reached,
            ahead[not forward],
            forward=forward,
            keep=keep,
            width=width,
            below=below,
            patience=_PATIENCE - made,
            hard_below=hard_below,
            most=_ENOUGH - made,
        )
        if swept is None:
            break
        # Or groups are missing, and nothing would be proved.
        assert keep is not Keep.BEST or swept.finish_seconds < below, "no pass to the other end"
        if swept.chosen:
            found = planned(_groups(choices, swept.chosen, asked), times, counts, asked)
            best = min(best, found, key=lambda each: each.finish_seconds)
        if swept.bounds:
            spared = min(spared, swept.below)
            bound = max(bound, min(swept.finish_seconds, spared, best.finish_seconds))
            ahead[forward] = swept.fronts
            choices = choices.only(swept.useful)
        made += swept.made
        if best.finish_seconds <= bound * (1 + tolerance + _ROUNDING):
            break
    assert bound <= best.finish_seconds * (1 + _SURE), "a plan finishes before what was proved"
    return planned(best.groups, times, counts, methods, bound)


def _passes() -> Iterator[tuple[bool, Keep, int]]:
    """Whether forward, what is kept, and how much."""
    yield True, Keep.BEST, 1
    yield False, Keep.MEMBERS, 4
    yield False, Keep.PIECES, 1
    yield True, Keep.MEMBERS, 8
    width, forward = 4, True
    while width <= _WIDEST:
        yield forward, Keep.MEMBERS, 8 * width
        yield forward, Keep.PIECES, width
        width, forward = 2 * width, not forward


def _best_by_rule(
    backward_seconds: Sequence[float | int], sizes: Sequence[int], methods: Sequence[Method]
) -> Plan:
    found = []
    for method in methods:
        found += [rule(backward_seconds, sizes, method) for rule in (single, wfbp, mg_wfbp)]
        found += [
            omgs_greedy(backward_seconds, sizes, method, as_published=published)
            for published in (True, False)
        ]
    return min(found, key=lambda each: each.finish_seconds)


def _groups(choices: Choices, chosen: Sequence[int], methods: Sequence[Method]) -> list[Group]:
    return [
        Group(int(choices.start[at]), int(choices.stop[at]), methods[choices.method[at]].name)
        for at in chosen
    ]
