"""Schedules by their names, for settings and the command line."""

from collections.abc import Callable

from ._complete import complete
from ._dissemination import dissemination
from ._hypercube import hypercube
from ._matching import matching
from ._ring import ring
from ._schedule import Schedule

_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "dissemination": dissemination,
    "hypercube": hypercube,
    "matching": matching,
    "complete": complete,
    "ring": ring,
}

SCHEDULE_NAMES = tuple(_SCHEDULES)
"""What `by_name` knows."""


def by_name(name: str, world_size: int, *, seed: int = 0, rotate: bool | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `SCHEDULE_NAMES`.
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; None for what the schedule does by itself,
            which is to rotate, unless it is the ring.

    Returns:
        The schedule.

    Raises:
        ValueError: when the name is unknown, or the schedule does not take this world size.

    Example:
        >>> by_name("matching", 12).symmetric
        True
    """
    if name not in _SCHEDULES:
        raise ValueError(
            f"no schedule is called {name!r}: choose one of {', '.join(SCHEDULE_NAMES)}, "
            "or build one with from_graph or from_matrix"
        )
    options = {} if rotate is None else {"rotate": rotate}
    return _SCHEDULES[name](world_size, seed=seed, **options)
