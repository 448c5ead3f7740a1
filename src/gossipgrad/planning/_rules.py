"""The published rules for merging gradients, for comparison; each by one method for all groups."""

import math
from collections.abc import Sequence
from itertools import pairwise

from ._method import Method, checked_step, cost
from ._plan import Merge, Plan, planned

__all__ = ["mg_wfbp", "omgs_greedy", "single", "threshold", "wfbp"]

Seconds = Sequence[float | int]


def wfbp(backward_seconds: Seconds, sizes: Sequence[int], method: Method) -> Plan:
    """Every tensor by itself, as soon as its gradient is there: wait-free back-propagation.

    With a sparse method this is LAGS, layer-wise sparsification.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    return _cut(range(1, len(sizes)), backward_seconds, sizes, method)


def single(backward_seconds: Seconds, sizes: Sequence[int], method: Method) -> Plan:
    """All tensors in one group, after backward.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    return _cut((), backward_seconds, sizes, method)


def threshold(
    backward_seconds: Seconds,
    sizes: Sequence[int],
    method: Method,
    *,
    size_bytes: int,
    first_size_bytes: int | None = None,
    element_bytes: int = 4,
) -> Plan:
    """A group closes as soon as it holds so many bytes.

    As DistributedDataParallel fills its buckets, with 25 MiB and a first of 1 MiB by default, and
    as OMGS-SGD's code merges when its planner is off (8,192 elements).

    Args:
        backward_seconds: Of each tensor, in the order of backward.
        sizes: Their elements.
        method: How all groups travel.
        size_bytes: Where a group is full.
        first_size_bytes: Where the first is; None: as the others.
        element_bytes: Of an element, whatever travels.

    Raises:
        ValueError: A limit is no number of 1 or more, or `method` is not one; or as `plan`.
    """
    times, counts, _ = checked_step(backward_seconds, sizes, [method])
    first = size_bytes if first_size_bytes is None else first_size_bytes
    for limit in (size_bytes, first, element_bytes):
        if not 1 <= limit < math.inf:
            raise ValueError(f"a limit of {limit!r} bytes: it must be 1 or more, and finite")
    cuts, filled = [], 0
    for tensor, elements in enumerate(counts[:-1]):
        filled += elements * element_bytes
        if filled >= (size_bytes if cuts else first):
            cuts.append(tensor + 1)
            filled = 0
    return _cut(cuts, times, counts, method)


def mg_wfbp(backward_seconds: Seconds, sizes: Sequence[int], method: Method) -> Plan:
    """Merge a group with the next tensor if that costs less than a start-up: MG-WFBP.

    The rule of Shi et al., INFOCOM 2019, as its code has it: it merges if communication of the
    group would not have begun when the next gradient is there, or would have been under way for
    less than a start-up. It knows nothing of selection, which takes part in the time that the plan
    is said to take.

    Deviation 1: the start-up is what the merge saves, `t(a) + t(b) - t(a + b)`, which is the
    constant of an affine cost and means something for others.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    times, counts, _ = checked_step(backward_seconds, sizes, [method])

    def send(elements: int) -> float:
        return cost(method, "communicate_seconds", elements)

    cuts = []
    computed = begins = times[0]
    merged, took = counts[0], send(counts[0])
    for tensor in range(1, len(counts)):
        computed += times[tensor]
        alone, together = send(counts[tensor]), send(merged + counts[tensor])
        waits, saves = computed - begins, took + alone - together
        if waits < took and (waits < 0 or waits < saves):
            merged, took, begins = merged + counts[tensor], together, max(begins, computed)
        else:
            cuts.append(tensor)
            merged, took, begins = counts[tensor], alone, max(begins + took, computed)
    return _cut(cuts, times, counts, method)


def omgs_greedy(
    backward_seconds: Seconds, sizes: Sequence[int], method: Method, *, as_published: bool = False
) -> Plan:
    """Merge a group with the next tensor if what that delays is less than what it saves: OMGS-SGD.

    The rule of Shi et al., INFOCOM 2020, by its code (`_generate_groups_mgs`). What a merge delays
    is the next tensor's backward and the selection that grows faster than size, less what the group
    would have waited for the wire anyway; what it saves is a start-up. It looks one tensor ahead
    and never back, and so is not optimal: `plan` is.

    Deviation 1: it decides on the first two tensors, too. The code always sends these two together,
    while its rule reckons as if they were not: `as_published=True`.

    Args:
        backward_seconds: Of each tensor, in the order of backward.
        sizes: Their elements.
        method: How all groups travel.
        as_published: Without deviation 1.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    times, counts, _ = checked_step(backward_seconds, sizes, [method])

    def select(elements: int) -> float:
        return cost(method, "select_seconds", elements)

    def send(elements: int) -> float:
        return cost(method, "communicate_seconds", elements)

    cuts = []
    begun = free = 0.0
    merged, takes = counts[0], times[0]
    for tensor in range(1, len(counts)):
        following = counts[tensor]
        ready = begun + takes + select(merged)
        sent = max(free, ready)
        delays = times[tensor] + select(merged + following)
        delays -= select(merged) + select(following) + (sent - ready)
        saves = send(merged) + send(following) - send(merged + following)
        bound_together = as_published and tensor == 1
        if delays < saves and not bound_together:
            merged, takes = merged + following, takes + times[tensor]
        else:
            if not bound_together:
                cuts.append(tensor)
            begun, free = ready, sent + send(merged)
            merged, takes = following, times[tensor]
    return _cut(cuts, times, counts, method)


def _cut(
    cuts: Sequence[int], backward_seconds: Seconds, sizes: Sequence[int], method: Method
) -> Plan:
    """The plan whose groups but the first begin at these tensors."""
    times, counts, known = checked_step(backward_seconds, sizes, [method])
    ends = [0, *cuts, len(counts)]
    groups = [Merge(start, stop, method.name) for start, stop in pairwise(ends)]
    return planned(groups, times, counts, known)
