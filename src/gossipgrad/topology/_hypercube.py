"""The hypercube schedule: partners differ in one bit."""

from dataclasses import dataclass
from typing import ClassVar

from ._rotating import Positions, RotatingSchedule, ceil_log2


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypercube(RotatingSchedule):
    """See `hypercube`."""

    name: ClassVar[str] = "hypercube"

    def __post_init__(self) -> None:
        RotatingSchedule.__post_init__(self)
        p = self.world_size
        if p & (p - 1):
            raise ValueError(
                f"hypercube needs a world size that is a power of two, got {p}: "
                f"dissemination({p}) and matching({p}) work for any"
            )

    @property
    def period(self) -> int:
        """`log2 world_size`."""
        return ceil_log2(self.world_size)

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return True

    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        partner = position ^ (1 << turn)
        return partner, partner


def hypercube(world_size: int, *, seed: int = 0, rotate: bool = True) -> Hypercube:
    r"""Symmetric pairs for a power of two, the exact average after every period.

    With $p$ ranks, $L = \log_2 p$ and $k = t \bmod L$, positions $r$ and $r \oplus 2^k$ meet.
    Each period stands on the next seeded relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, a power of two.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

    Returns:
        The schedule.

    Raises:
        ValueError: when the world size is no power of two (`dissemination` and `matching` take
            any), or the seed is out of range.

    Example:
        >>> schedule = hypercube(8, rotate=False)
        >>> [schedule.peers(round, rank=5).send_to for round in range(schedule.period)]
        [4, 7, 1]

    References:
        Daily et al., "GossipGraD", arXiv:1803.05880. Deviations: 2 and 3 of `dissemination`.
    """
    return Hypercube(world_size=world_size, seed=seed, rotate=rotate)
