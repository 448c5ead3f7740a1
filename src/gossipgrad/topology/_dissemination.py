"""The dissemination schedule: send `2^k` to one side, receive from the other."""

from dataclasses import dataclass
from typing import ClassVar

from ._rotating import Positions, RotatingSchedule, ceil_log2


@dataclass(frozen=True, kw_only=True, slots=True)
class Dissemination(RotatingSchedule):
    """See `dissemination`."""

    name: ClassVar[str] = "dissemination"

    @property
    def period(self) -> int:
        """`ceil(log2 world_size)`."""
        return ceil_log2(self.world_size)

    @property
    def symmetric(self) -> bool:
        """False, unless there are only two ranks: they send to each other."""
        return self.world_size <= 2

    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        hop = 1 << turn
        return (position - hop) % self.world_size, (position + hop) % self.world_size


def dissemination(world_size: int, *, seed: int = 0, rotate: bool = True) -> Dissemination:
    r"""The schedule that GossipGraD prefers: any world size, every rank busy in every round.

    With $p$ ranks, $L = \lceil \log_2 p \rceil$ and $k = t \bmod L$, the rank at position $r$
    sends to position $r - 2^k$ and receives from $r + 2^k$, both modulo $p$. After $L$ rounds
    every rank holds something of every other, exactly the average when $p$ is a power of two and
    the weight one half. Each period stands on the next seeded relabelling.

    Directed: when a message is void the mean is not kept. Use a symmetric schedule (`matching`,
    `hypercube`) where ranks may be late beyond waiting for, or die.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

    Returns:
        The schedule.

    Raises:
        ValueError: when the world size or the seed is out of range.

    Example:
        >>> schedule = dissemination(6, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [5, 4, 2]

    References:
        Daily et al., "GossipGraD", arXiv:1803.05880, and the authors' `next()` in
        caffe-nvidia (`shufgrad_summit`), for the directions.

        Deviations: 1. any world size, where the authors' program takes powers of two.
        2. relabellings are computed by each rank and never repeat, where the authors shuffle p
        communicators once and go round them. 3. the first period is relabelled too.
    """
    return Dissemination(world_size=world_size, seed=seed, rotate=rotate)
