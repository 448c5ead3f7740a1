"""The published rules for merging gradients, for comparison; each by one method for all groups."""

from collections.abc import Sequence
from itertools import pairwise

from ._merge_plan import Plan, planned
from ._step import checked_step, finite
from ._timeline import Merge, Method, check_method, cost

__all__ = ["mg_wfbp", "omgs_greedy", "single", "threshold", "wfbp"]

Seconds = Sequence[float | int]


def wfbp(backward_seconds: Seconds, sizes: Sequence[int], method: Method) -> Plan:
    """Every tensor by itself, as soon as its gradient is there: wait-free back-propagation.

    With a sparse method this is LAGS, layer-wise sparsification.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    backward_seconds, sizes = checked_step(backward_seconds, sizes)
    check_method(method)
    return _cut(range(1, len(sizes)), backward_seconds, sizes, method)


def single(backward_seconds: Seconds, sizes: Sequence[int], method: Method) -> Plan:
    """All tensors in one group, after backward.

    Raises:
        ValueError: As `plan`; or `method` is not one.
    """
    backward_seconds, sizes = checked_step(backward_seconds, sizes)
    check_method(method)
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

    As DistributedDataParallel fills its buckets, with 25 MiB and a first of 1 MiB unless it is told
    otherwise, and as OMGS-SGD's code merges when its planner is off (8,192 elements).

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
    backward_seconds, sizes = checked_step(backward_seconds, sizes)
    check_method(method)
    limits = {"size_bytes": size_bytes, "element_bytes": element_bytes}
    if first_size_bytes is not None:
        limits["first_size_bytes"] = first_size_bytes
    for name, value in limits.items():
        if not finite(value) >= 1:
            raise ValueError(f"{name} is {value!r}: it must be 1 or more, and finite")
    cuts, held = [], 0
    for place, elements in enumerate(sizes):
        held += elements * element_bytes
        if held >= (size_bytes if cuts or first_size_bytes is None else first_size_bytes):
            cuts.append(place + 1)
            held = 0
    return _cut([place for place in cuts if place < len(sizes)], backward_seconds, sizes, method)


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
    backward_seconds, sizes = checked_step(backward_seconds, sizes)
    check_method(method)
    cuts = []
    computed = backward_seconds[0]
    held = sizes[0]
    took = cost(method, "communicate_seconds", held)
    begins = computed
    for place in range(1, len(sizes)):
        computed += backward_seconds[place]
        alone = cost(method, "communicate_seconds", sizes[place])
        together = cost(method, "communicate_seconds", held + sizes[place])
        waits, saves = computed - begins, took + alone - together
        if waits < took and (waits < 0 or waits < saves):
            held, took, begins = held + sizes[place], together, max(begins, computed)
        else:
            cuts.append(place)
            held, took, begins = sizes[place], alone, max(begins + took, computed)
    return _cut(cuts, backward_seconds, sizes, method)


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
    backward_seconds, sizes = checked_step(backward_seconds, sizes)
    check_method(method)

    def select(elements: int) -> float:
        return cost(method, "select_seconds", elements)

    def send(elements: int) -> float:
        return cost(method, "communicate_seconds", elements)

    cuts = []
    begun = free = 0.0
    held, takes = sizes[0], backward_seconds[0]
    for place in range(1, len(sizes)):
        following = sizes[place]
        ready = begun + takes + select(held)
        sent = max(free, ready)
        delays = backward_seconds[place] + select(held + following)
        delays -= select(held) + select(following) + (sent - ready)
        saves = send(held) + send(following) - send(held + following)
        bound_together = as_published and place == 1
        if delays < saves and not bound_together:
            held, takes = held + following, takes + backward_seconds[place]
        else:
            if not bound_together:
                cuts.append(place)
            begun, free = ready, sent + send(held)
            held, takes = following, backward_seconds[place]
    return _cut(cuts, backward_seconds, sizes, method)


def _cut(
    cuts: Sequence[int], backward_seconds: Seconds, sizes: Sequence[int], method: Method
) -> Plan:
    """The plan whose groups but the first begin at these tensors."""
    ends = [0, *cuts, len(sizes)]
    groups = [Merge(start, stop, method.name) for start, stop in pairwise(ends)]
    return planned(groups, backward_seconds, sizes, [method])
