"""The rule by which something is flat: what it grows by over the second half of a part."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ._sizes import MEASURES

__all__ = ["ALLOWED", "growth", "judge"]

# What the line of least squares through the second half may rise by, from its begin to its end: a
# share of the mean, or so much, whichever is more.
ALLOWED: dict[str, tuple[float, float]] = {
    "rss_bytes": (0.01, 1 << 20),
    "handles": (0.0, 0.5),
    "threads": (0.0, 0.5),
    "blocks": (0.005, 0.0),
    "entries": (0.05, 32.0),
}


def growth(at: Sequence[float], values: Sequence[float]) -> float:
    """What the line of least squares through some values rises by.

    Example:
        >>> growth([0, 1, 2, 3], [5, 6, 7, 8]), growth([0, 1, 2, 3], [5, 7, 5, 7])
        (3.0, 1.2)
        >>> growth([7, 7], [5, 8])
        3.0
    """
    middle, mean = fmean(at), fmean(values)
    spread = sum((x - middle) ** 2 for x in at)
    if not spread:  # nothing was exchanged between the samples
        return float(values[-1] - values[0])
    slope = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread
    return slope * (max(at) - min(at))


def judge(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each measure: its mean, its growth, what is allowed, and whether it is flat.

    Args:
        samples: Of one rank in one part, in order; `exchanges` says where in it each was taken.
    """
    half = samples[len(samples) // 2 :]
    at = [sample["exchanges"] for sample in half]
    found = {}
    for measure in MEASURES:
        values = [sample[measure] for sample in half]
        share, least = ALLOWED[measure]
        mean = fmean(values)
        allowed = max(share * mean, least)
        grew = growth(at, values)
        found[measure] = {
            "mean": round(mean, 1),
            "growth": round(grew, 2),
            "allowed": round(allowed, 2),
            "flat": grew <= allowed,
        }
    return found
