"""A schedule with each round repeated, and its weights scaled."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ._schedule import Ranks, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated(Schedule):
    """See `repeated`."""

    inner: Schedule
    """The schedule whose rounds are repeated."""
    times: int
    """Number of repetitions of each round."""
    share: float
    """Factor of its weights."""

    @property
    def period(self) -> int:
        """The period of the inner schedule, in rounds of this one."""
        return self.inner.period * self.times

    @property
    def symmetric(self) -> bool:
        """Whether partners send to each other."""
        return self.inner.symmetric

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        return self.inner.round_peers(round // self.times)

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """See `Schedule.round_weights`; the share is taken of them."""
        return self.share * self.inner.round_weights(round // self.times, default)

    def describe(self) -> dict:
        """Return the identity of this schedule; see `Schedule.describe`."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "times": self.times,
            "share": self.share,
            "inner": self.inner.describe(),
        }


def repeated(schedule: Schedule, times: int, *, share: float = 1.0) -> Repeated:
    """Return a schedule with each round `times` times in a row, for several exchanges per step.

    Args:
        schedule: The schedule to repeat.
        times: Number of repetitions, 1 or more.
        share: Factor of its weights, above 0 to 1; a half makes `W` `(I + W) / 2`.

    Raises:
        ValueError: when one of them is out of range.

    Example:
        >>> from gossipgrad.topology import ring
        >>> twice = repeated(ring(6), 2)
        >>> [twice.peers(round, rank=0).send_to for round in range(4)]
        [1, 1, 5, 5]
    """
    if times < 1 or not 0.0 < share <= 1.0:
        raise ValueError(
            f"times={times} and share={share}: a round lasts at least once, and its weights are "
            "multiplied by a number above 0, at most 1"
        )
    return Repeated(
        name="repeated",
        world_size=schedule.world_size,
        inner=schedule,
        times=int(times),
        share=float(share),
    )
