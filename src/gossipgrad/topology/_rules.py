"""The schedules that need no network given: dissemination, hypercube, matching, complete, ring."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._rotation import RotatingSchedule, relabelling
from ._schedule import NOBODY, Ranks, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Dissemination(RotatingSchedule):
    """See `dissemination`."""

    name: ClassVar[str] = "dissemination"

    @property
    def symmetric(self) -> bool:
        """False, unless there are only two ranks: they send to each other."""
        return self.world_size <= 2

    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
        hop = 1 << turn
        return (position - hop) % self.world_size, (position + hop) % self.world_size


def dissemination(world_size: int, *, seed: int = 0, rotate: bool = True) -> Dissemination:
    r"""The schedule that GossipGraD prefers: any world size, every rank busy in every round.

    With $p$ ranks, $L = \lceil \log_2 p \rceil$ and $k = t \bmod L$, the rank at position $r$
    sends to position $r - 2^k$ and receives from $r + 2^k$, both modulo $p$. After $L$ rounds
    every rank holds something of every other, exactly the average when $p$ is a power of two and
    the weight one half. Each period has the next seeded relabelling.

    Directed: when a message is void the mean is not kept. Use a symmetric schedule (`matching`,
    `hypercube`) where ranks may be late beyond waiting for, or die.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

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

    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
        partner = position ^ (1 << turn)
        return partner, partner


def hypercube(world_size: int, *, seed: int = 0, rotate: bool = True) -> Hypercube:
    r"""Symmetric pairs for a power of two, the exact average after every period.

    With $p$ ranks, $L = \log_2 p$ and $k = t \bmod L$, positions $r$ and $r \oplus 2^k$ meet.
    Each period has the next seeded relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, a power of two.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Matching(RotatingSchedule):
    """See `matching`."""

    name: ClassVar[str] = "matching"

    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
        even = self.world_size + self.world_size % 2
        hop = min(2 << turn, even) - 1
        partner = (position + (1 - 2 * (position % 2)) * hop) % even
        return partner, partner


def matching(world_size: int, *, seed: int = 0, rotate: bool = True) -> Matching:
    r"""Symmetric pairs for any world size: the schedule for runs that must survive lost messages.

    With $n$ the world size $p$ rounded up to even, $L = \lceil \log_2 p \rceil$ and
    $k = t \bmod L$, every even position $x$ meets the odd position
    $x + \min(2^{k+1}, n) - 1$ modulo $n$. When $p$ is odd, the last position is empty and the rank
    that would meet it sits the round out: one rank a round, another in each round of the period.
    These are the $L$ dimensions of a Knoedel graph, all different: for even $p$ every rank holds
    something of every other after one period, which no pairing does sooner, and exactly the
    average when $p$ is a power of two and the weight one half. Each period has the next seeded
    relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete(RotatingSchedule):
    """See `complete`."""

    name: ClassVar[str] = "complete"

    @property
    def period(self) -> int:
        """The rounds of a tournament: `world_size - 1` when even, `world_size` when odd."""
        return self.world_size - 1 + self.world_size % 2

    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
        seats = self.period
        # In the circle's own order values creep along it: 256 rounds, not 7, to contract tenfold
        # at 256 ranks. Any fixed shuffle will do.
        shift = int(relabelling(seats, seed=0, index=0).rank_at[turn])
        partner = (2 * shift - position) % seats
        # On the circle position `shift` would meet itself: it meets the one without a seat.
        partner = np.where(position == shift, seats, partner)
        partner = np.where(position == seats, shift, partner)
        return partner, partner


def complete(world_size: int, *, seed: int = 0, rotate: bool = True) -> Complete:
    r"""Every pair meets exactly once a period: a round-robin tournament.

    $p - 1$ rounds when the world size $p$ is even; $p$ when it is odd, each rank sitting out
    once. The rounds are those of the circle method in a shuffled order, which mixes in a few
    rounds what the usual order takes the whole period for. Each period has the next seeded
    relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.

    Raises:
        ValueError: when the world size or the seed is out of range.

    Example:
        >>> schedule = complete(4, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [3, 2, 1]
    """
    return Complete(world_size=world_size, seed=seed, rotate=rotate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(RotatingSchedule):
    """See `ring`."""

    name: ClassVar[str] = "ring"

    @property
    def period(self) -> int:
        """The matchings that cover the ring: 2 when the world size is even, 3 when it is odd."""
        return 1 if self.world_size <= 2 else 2 + self.world_size % 2

    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
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
    """The ring, for comparison and for networks that are rings; static unless `rotate` is set.

    Rank `r` meets its neighbours `r + 1` and `r - 1` in turns, one a round. The ring is coloured
    into matchings: 2 when the world size is even; 3 when it is odd, the third being the one edge
    that closes the ring. Mixing takes on the order of world size squared rounds.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings of a ring that rotates; the same on all ranks.
        rotate: whether each period is another ring, on a new relabelling.

    Raises:
        ValueError: when the world size or the seed is out of range.

    Example:
        >>> [ring(6).peers(round, rank=0).send_to for round in range(4)]
        [1, 5, 1, 5]
    """
    return Ring(world_size=world_size, seed=seed, rotate=rotate)


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
        rotate: whether to relabel after each period; None: all but the ring do.

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
