"""The matching schedule: symmetric pairs for any world size."""

from dataclasses import dataclass
from typing import ClassVar

from ._rotating import Positions, RotatingSchedule, ceil_log2


@dataclass(frozen=True, kw_only=True, slots=True)
class Matching(RotatingSchedule):
    """See `matching`."""

    name: ClassVar[str] = "matching"

    @property
    def period(self) -> int:
        """`ceil(log2 world_size)`."""
        return ceil_log2(self.world_size)

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return True

    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        places = self.world_size + self.world_size % 2
        hop = min(2 << turn, places) - 1
        partner = (position + (1 - 2 * (position % 2)) * hop) % places
        return partner, partner


def matching(world_size: int, *, seed: int = 0, rotate: bool = True) -> Matching:
    r"""Symmetric pairs for any world size: the schedule for runs that must survive lost messages.

    With $n$ the world size $p$ rounded up to even, $L = \lceil \log_2 p \rceil$ and
    $k = t \bmod L$, every even position $x$ meets the odd position
    $x + \min(2^{k+1}, n) - 1$ modulo $n$. When $p$ is odd, the last place is empty and whoever
    would meet it sits the round out: one rank a round, another in each round of the period.
    These are the $L$ dimensions of a Knoedel graph, all different: for even $p$ every rank holds
    something of every other after one period, which no pairing does sooner, and exactly the
    average when $p$ is a power of two and the weight one half. Each period stands on the next
    seeded relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

    Returns:
        The schedule.

    Raises:
        ValueError: when the world size or the seed is out of range.

    Example:
        >>> schedule = matching(6, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [1, 3, 5]

    References:
        Knoedel, "New gossips and telephones", Discrete Mathematics 13, 1975.

        Deviations: 1. the last dimension is cut to `n - 1`, so that it differs from all the others
        when `n` is no power of two.
    """
    return Matching(world_size=world_size, seed=seed, rotate=rotate)
