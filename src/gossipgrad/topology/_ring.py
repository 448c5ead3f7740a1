"""The ring schedule: two neighbours, in turns."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from ._schedule import NOBODY, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Schedule):
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

    def _peers_of(
        self, round: int, ranks: Int[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        p, turn = self.world_size, round % self.period
        if turn == 2:
            # Only the edge that closes an odd ring is left.
            partner = np.where(ranks == 0, p - 1, np.where(ranks == p - 1, 0, NOBODY))
        else:
            partner = np.where(ranks % 2 == turn, ranks + 1, ranks - 1)
            if p % 2 == 0:
                partner %= p
            partner = np.where((partner < 0) | (partner >= p), NOBODY, partner)
        return partner, partner

    def describe(self) -> dict:
        """What makes this schedule the one it is, in plain JSON; see `Schedule.describe`."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "rotate": False,
            "seed": None,
        }


def ring(world_size: int) -> Ring:
    """The static ring, for comparison and for networks that are rings: no seed, no rotation.

    Rank `r` meets its neighbours `r + 1` and `r - 1` in turns, one a round. The ring is coloured
    into matchings: 2 when the world size is even; 3 when it is odd, the third being the one edge
    that closes the ring. Mixing takes on the order of world size squared rounds.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.

    Returns:
        The schedule.

    Raises:
        ValueError: when the world size is out of range.

    Example:
        >>> [ring(6).peers(round, rank=0).send_to for round in range(4)]
        [1, 5, 1, 5]
    """
    return Ring(world_size=world_size)
