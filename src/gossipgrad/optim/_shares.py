"""Work shared out among ranks."""

from collections.abc import Sequence

__all__ = ["distribute"]


def distribute(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return the owner of each piece of work: the dearest goes to the rank with the least so far.

    It adds the costs to `loads`.
    """
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        owners[piece] = min(range(len(loads)), key=lambda rank: loads[rank])
        loads[owners[piece]] += costs[piece]
    return owners
