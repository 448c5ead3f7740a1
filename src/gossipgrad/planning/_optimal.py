"""The plan that finishes first, with proof: bounds and plans from either end, in turns."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from ._merge_plan import Plan, planned
from ._ranges import all_choices
from ._rules import mg_wfbp, omgs_greedy, single, wfbp
from ._sweep import Keep, knowing_nothing, sweep
from ._timeline import Group, Method, by_name, check_step

__all__ = ["plan"]

_ENOUGH = 200_000_000  # states looked at before it stops at a bound that is not as close
_PATIENCE = 10_000_000
_ROUNDING = 1e-12
_NARROWEST, _WIDEST = 4, 1 << 16


def plan(
    backward_seconds: Sequence[float | int],
    sizes: Sequence[int],
    methods: Sequence[Method],
    *,
    tolerance: float | int = 1e-4,
) -> Plan:
    """The groups, each with its method, that finish first.

    Time goes as in A.1 of the method: one thread computes the gradients and, after the last one of
    a group, selects what of it travels; groups travel one after another, each once it is selected.

    It is a shortest path with two lengths, selection and communication, of which neither tells
    alone which of two halves is better. So states go into fronts (see `_fronts.py`), made by passes
    from the first gradient and from the last in turns: each leaves out what, by the fronts of the
    one before, cannot beat the best plan that is known. The first passes keep a few states, which
    finds good plans, and the convex hulls of fronts, which bound what any plan can do; then fronts
    are kept as they are, ever larger ones, until bound and plan meet.

    Args:
        backward_seconds: Of each tensor, in the order in which backward finishes them: from when
            the gradient before was there until this one is.
        sizes: Their elements.
        methods: How a group may travel.
        tolerance: How much later than the earliest the plan may finish, in parts of that. 0 is
            exact, up to rounding.

    Returns:
        The plan, never above `wfbp`, `mg_wfbp`, `omgs_greedy` and `single` with any of the methods.
        Its `gap` is proved. Where that would need too much work, it is above `tolerance`, and the
        plan is the best that was found.

    Raises:
        ValueError: There is no tensor or no method, two methods have one name, a size is below 1,
            or a time is negative or not finite.

    Example:
        Three tensors, the first as large as ten of the others. The published rule merges all;
        it is better not to hold up the first.

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
    check_step(backward_seconds, sizes)
    by_name(methods)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}: give a share of the time, 0 or more")
    best = _best_by_rule(backward_seconds, sizes, methods)
    tensors = len(sizes)
    reached = np.array([0.0, *accumulate(map(float, backward_seconds))])
    choices = all_choices(sizes, methods)
    bound, made = 0.0, 0
    ahead = {forward: knowing_nothing(tensors) for forward in (False, True)}
    for forward, keep, width in _passes():
        below = best.finish_seconds / (1 + tolerance if made > _PATIENCE else 1.0)
        swept = sweep(
            choices,
            reached,
            ahead[not forward],
            forward=forward,
            keep=keep,
            width=width,
            below=below,
        )
        if swept.chosen:
            groups = [
                Group(
                    int(choices.start[at]), int(choices.stop[at]), methods[choices.method[at]].name
                )
                for at in swept.chosen
            ]
            found = planned(groups, backward_seconds, sizes, methods)
            best = min(best, found, key=lambda each: each.finish_seconds)
        if keep is not Keep.MEMBERS:
            bound = max(bound, min(swept.finish_seconds, below))
            ahead[forward] = swept.fronts
            choices = choices.only(swept.useful)
        made += swept.made
        if best.finish_seconds <= bound * (1 + tolerance + _ROUNDING) or made > _ENOUGH:
            break
    return planned(best.groups, backward_seconds, sizes, methods, bound)


def _passes() -> Iterator[tuple[bool, Keep, int]]:
    """Whether forward, what is kept, and how much."""
    yield True, Keep.BEST, 1
    yield False, Keep.MEMBERS, 4
    yield False, Keep.PIECES, 1
    yield True, Keep.MEMBERS, 8
    width, forward = _NARROWEST, True
    while width <= _WIDEST:
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
