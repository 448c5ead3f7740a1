"""When the gradients of a model are there, as all ranks have measured it together."""

import statistics
from collections.abc import Mapping, Sequence

__all__ = ["backward_of", "medians"]


def medians(stamps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over rounds, by name, of those in which it had a gradient."""
    return {
        name: statistics.median(times[name] for times in stamps if name in times)
        for name in dict.fromkeys(name for times in stamps for name in times)
    }


def backward_of(
    told: Sequence[Mapping[str, float]], names: Sequence[str]
) -> tuple[list[str], list[float]]:
    """The order of gradients, and how long backward takes for each after the one before.

    The order is rank 0's; where that has no gradient of a parameter, it comes last. Times are
    medians over the ranks that have one.

    Args:
        told: Of each rank, seconds from the first gradient to each, by name.
        names: Of all parameters.
    """
    first = told[0]
    ordered = sorted(first, key=lambda name: first[name])
    ordered += [name for name in names if name not in first]
    ready = [
        statistics.median(times[name] for times in told if name in times)
        if any(name in times for times in told)
        else 0.0
        for name in ordered
    ]
    backward, before = [], ready[0]
    for at in ready:
        backward.append(max(0.0, at - before))
        before = max(before, at)
    return ordered, backward
