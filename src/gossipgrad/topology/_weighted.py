"""A schedule whose exchanges keep a weighted mean over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ._schedule import NOBODY, Ranks, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted(Schedule):
    """See `weighted`."""

    inner: Schedule
    """The schedule of the partners."""
    masses: tuple[float, ...]
    """What each rank counts in the mean."""

    @property
    def period(self) -> int:
        """The period of the inner schedule."""
        return self.inner.period

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return self.inner.symmetric

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        return self.inner.round_peers(round)

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """See `Schedule.round_weights`: two partners take twice the default together."""
        partner = self.inner.round_peers(round).recv_from
        own = np.array(self.masses)
        other = np.where(partner == NOBODY, own, own[partner])
        return 2.0 * self.inner.round_weights(round, default) * other / (own + other)

    def share(self, rank: int, members: Sequence[int]) -> float:
        """Return by what to multiply a value of a rank, so that the mean of members is weighted."""
        return self.masses[rank] * len(members) / sum(self.masses[one] for one in members)

    def describe(self) -> dict:
        """Return the identity of this schedule; see `Schedule.describe`."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "masses": [mass.hex() for mass in self.masses],
            "inner": self.inner.describe(),
        }


def weighted(schedule: Schedule, masses: Sequence[float]) -> Weighted:
    r"""Return a schedule whose exchanges keep $\sum_i m_i x_i$, for ranks that count unequally.

    Of partners $i$ and $j$, rank $i$ takes $m_j / (m_i + m_j)$ of the delta: both then have their
    weighted mean.

    Args:
        schedule: Symmetric.
        masses: What each rank counts, such as its batch size: above 0 and finite.

    Raises:
        ValueError: when the schedule is not symmetric, or a mass is out of range.

    Example:
        >>> from gossipgrad.topology import matching
        >>> weighted(matching(2), [3.0, 1.0]).mixing_matrix(0)
        array([[0.75, 0.25],
               [0.75, 0.25]])
    """
    if not schedule.symmetric:
        raise ValueError(
            f"ranks that count unequally need partners that send to each other, which "
            f"{schedule.name} has not: choose matching"
        )
    if len(masses) != schedule.world_size or not all(0.0 < mass < np.inf for mass in masses):
        raise ValueError(
            f"masses are {list(masses)}: give each of {schedule.world_size} ranks a number above 0"
        )
    return Weighted(
        name="weighted",
        world_size=schedule.world_size,
        inner=schedule,
        masses=tuple(float(mass) for mass in masses),
    )
