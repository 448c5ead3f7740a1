"""The complete schedule: a round-robin tournament."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._relabelling import relabelling
from ._rotating import Positions, RotatingSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete(RotatingSchedule):
    """See `complete`."""

    name: ClassVar[str] = "complete"

    @property
    def period(self) -> int:
        """The rounds of a tournament: `world_size - 1` when even, `world_size` when odd."""
        return self.world_size - 1 + self.world_size % 2

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return True

    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        seats = self.period
        # In the circle's own order news would only creep along it: 256 rounds, not 7, to contract
        # tenfold at 256 ranks. Any fixed shuffle will do.
        shift = int(relabelling(seats, seed=0, index=0).rank_at[turn])
        partner = (2 * shift - position) % seats
        # On the circle position `shift` would meet itself: it meets the one who is not seated.
        partner = np.where(position == shift, seats, partner)
        partner = np.where(position == seats, shift, partner)
        return partner, partner


def complete(world_size: int, *, seed: int = 0, rotate: bool = True) -> Complete:
    r"""Every pair meets exactly once a period: a round-robin tournament.

    $p - 1$ rounds when the world size $p$ is even; $p$ when it is odd, each rank sitting out
    once. The rounds are those of the circle method in a shuffled order, which mixes in a few
    rounds what the usual order takes the whole period for. Each period stands on the next
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
        >>> schedule = complete(4, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [3, 2, 1]
    """
    return Complete(world_size=world_size, seed=seed, rotate=rotate)
