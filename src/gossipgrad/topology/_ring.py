"""The ring schedule: two neighbours, in turns."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._rotating import Positions, RotatingSchedule
from ._schedule import NOBODY


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(RotatingSchedule):
    """See `ring`."""

    name: ClassVar[str] = "ring"

    @property
    def period(self) -> int:
        """The matchings that cover the ring: 2 when the world size is even, 3 when it is odd."""
        if self.world_size <= 2:
            return 1
        return 2 + self.world_size % 2

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return True

    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        p = self.world_size
        if turn == 2:
            # Only the edge that closes an odd ring is left.
            partner = np.where(position == 0, p - 1, np.where(position == p - 1, 0, NOBODY))
        else:
            partner = np.where(position % 2 == turn, position + 1, position - 1)
            if p % 2 == 0:
                partner %= p
        return partner, partner


def ring(world_size: int, *, seed: int = 0, rotate: bool = False) -> Ring:
    """The ring, for comparison and for networks that are rings; static unless it is told to rotate.

    Rank `r` meets its neighbours `r + 1` and `r - 1` in turns, one a round. The ring is coloured
    into matchings: 2 when the world size is even; 3 when it is odd, the third being the one edge
    that closes the ring. Mixing takes on the order of world size squared rounds.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings of a ring that rotates; the same on all ranks.
        rotate: whether each period is another ring, on a new relabelling.

    Returns:
        The schedule.

    Raises:
        ValueError: when the world size or the seed is out of range.

    Example:
        >>> [ring(6).peers(round, rank=0).send_to for round in range(4)]
        [1, 5, 1, 5]
    """
    return Ring(world_size=world_size, seed=seed, rotate=rotate)
