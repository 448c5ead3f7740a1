"""The built-in schedules: dissemination, hypercube, matching, complete, ring."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._rotation import relabelling
from ._schedule import NOBODY, Ranks, Schedule, check_seed


class _Rule(NamedTuple):
    """The partners by position, and the number of turns."""

    meet: Callable[[int, int, Ranks], tuple[Ranks, Ranks]]
    """Of world size, turn and positions: the positions that each sends to and receives from.

    A position sits out where it meets itself or a position outside 0 to world size - 1.
    """
    period: Callable[[int], int] = lambda p: max(1, (p - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatingSchedule(Schedule):
    """A rule "position x meets position y in turn k", played on one relabelling after another.

    Round `t` is turn `t mod period` of the relabelling with index `t // period`. Without rotation
    the position of a rank is its own number.
    """

    seed: int = 0
    """Picks the sequence of relabellings; the same on all ranks."""
    rotate: bool = True
    """Whether each period has a new relabelling."""

    def __post_init__(self) -> None:
        # No super(): a dataclass with slots is a copy of the class that super() would look up.
        Schedule.__post_init__(self)
        check_seed(self.seed)
        if self.name == "hypercube" and not takes_hypercube(p := self.world_size):
            raise ValueError(
                f"hypercube needs a world size that is a power of two, got {p}: "
                f"dissemination({p}) and matching({p}) work for any"
            )

    @property
    def period(self) -> int:
        """The number of turns of the rule."""
        return _RULES[self.name].period(self.world_size)

    @property
    def symmetric(self) -> bool:
        """True, except for dissemination among more than two ranks."""
        return self.name != "dissemination" or self.world_size <= 2

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        index, turn = divmod(round, self.period)
        positions = np.arange(self.world_size, dtype=np.int64)
        if not self.rotate:
            rank_at = position_of = positions
        else:
            rank_at, position_of = relabelling(self.world_size, self.seed, index)

        def ranks_at(met: Ranks) -> Ranks:
            sits_out = (met == position_of) | (met < 0) | (met >= self.world_size)
            return np.where(sits_out, NOBODY, rank_at[np.where(sits_out, 0, met)])

        send_to, recv_from = _RULES[self.name].meet(self.world_size, turn, position_of)
        return ranks_at(send_to), ranks_at(recv_from)

    def describe(self) -> dict:
        """Return the identity of this schedule; see `Schedule.describe`.

        The seed is None without rotation, which does not use it.
        """
        return {
            "name": self.name,
            "world_size": self.world_size,
            "rotate": self.rotate,
            "seed": self.seed if self.rotate else None,
        }


def takes_hypercube(world_size: int) -> bool:
    """Whether a hypercube can have this world size."""
    return not world_size & (world_size - 1)


def _meet_dissemination(p: int, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
    hop = 1 << turn
    return (position - hop) % p, (position + hop) % p


def _meet_hypercube(p: int, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
    partner = position ^ (1 << turn)
    return partner, partner


def _meet_matching(p: int, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
    even = p + p % 2
    hop = min(2 << turn, even) - 1
    partner = (position + (1 - 2 * (position % 2)) * hop) % even
    return partner, partner


def _meet_complete(p: int, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
    seats = p - 1 + p % 2
    # In the circle's own order values creep along it: 256 rounds, not 7, to contract tenfold
    # at 256 ranks. Any fixed shuffle works.
    shift = int(relabelling(seats, seed=0, index=0).rank_at[turn])
    partner = (2 * shift - position) % seats
    # On the circle position `shift` would meet itself: it meets the one without a seat.
    partner = np.where(position == shift, seats, partner)
    partner = np.where(position == seats, shift, partner)
    return partner, partner


def _meet_ring(p: int, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
    if turn == 2:
        # Only the edge that closes an odd ring is left.
        partner = np.where(position == 0, p - 1, np.where(position == p - 1, 0, NOBODY))
    else:
        partner = np.where(position % 2 == turn, position + 1, position - 1)
        if p % 2 == 0:
            partner %= p
    return partner, partner


_RULES = {
    "dissemination": _Rule(_meet_dissemination),
    "hypercube": _Rule(_meet_hypercube),
    "matching": _Rule(_meet_matching),
    "complete": _Rule(_meet_complete, lambda p: p - 1 + p % 2),
    "ring": _Rule(_meet_ring, lambda p: 1 if p <= 2 else 2 + p % 2),
}

SCHEDULE_NAMES = tuple(_RULES)
"""What `by_name` knows."""


def by_name(name: str, world_size: int, *, seed: int = 0, rotate: bool | None = None) -> Schedule:
    """Return the schedule of that name.

    Args:
        name: one of `SCHEDULE_NAMES`.
        world_size: the number of ranks, 1 or more.
        seed: picks the relabellings, 0 to 2**64 - 1; the same on all ranks.
        rotate: whether to relabel after each period; without, the ranks keep their own numbers.
            None: all except the ring do.

    Raises:
        ValueError: when the name is unknown, the schedule does not take this world size, or the
            seed is out of range.

    Example:
        >>> by_name("matching", 12).symmetric
        True
    """
    if name not in _RULES:
        raise ValueError(
            f"no schedule is called {name!r}: choose one of {', '.join(SCHEDULE_NAMES)}, "
            "or build one with from_graph or from_matrix"
        )
    rotate = name != "ring" if rotate is None else rotate
    return RotatingSchedule(name=name, world_size=world_size, seed=seed, rotate=rotate)


def dissemination(world_size: int, *, seed: int = 0, rotate: bool = True) -> RotatingSchedule:
    r"""The schedule that GossipGraD prefers: any world size, every rank busy in every round.

    With $p$ ranks, $L = \lceil \log_2 p \rceil$ and $k = t \bmod L$, the rank at position $r$
    sends to position $r - 2^k$ and receives from $r + 2^k$, both modulo $p$. After $L$ rounds
    every rank holds something of every other, exactly the average when $p$ is a power of two and
    the weight one half. Each period has the next seeded relabelling.

    Directed: when a message is void the mean is not kept. Use a symmetric schedule (`matching`,
    `hypercube`) where ranks may be late beyond waiting for, or die.

    Arguments and errors are those of `by_name`.

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
    return RotatingSchedule(name="dissemination", world_size=world_size, seed=seed, rotate=rotate)


def hypercube(world_size: int, *, seed: int = 0, rotate: bool = True) -> RotatingSchedule:
    r"""Symmetric pairs for a power of two, the exact average after every period.

    With $p$ ranks, $L = \log_2 p$ and $k = t \bmod L$, positions $r$ and $r \oplus 2^k$ meet.
    Each period has the next seeded relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Arguments and errors are those of `by_name`; the world size is a power of two.

    Example:
        >>> schedule = hypercube(8, rotate=False)
        >>> [schedule.peers(round, rank=5).send_to for round in range(schedule.period)]
        [4, 7, 1]

    References:
        Daily et al., "GossipGraD", arXiv:1803.05880. Deviations: 2 and 3 of `dissemination`.
    """
    return RotatingSchedule(name="hypercube", world_size=world_size, seed=seed, rotate=rotate)


def matching(world_size: int, *, seed: int = 0, rotate: bool = True) -> RotatingSchedule:
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

    Arguments and errors are those of `by_name`.

    Example:
        >>> schedule = matching(6, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [1, 3, 5]

    References:
        Knoedel, "New gossips and telephones", Discrete Mathematics 13, 1975.

        Deviations: 1. the last dimension is cut to `n - 1`, so that it differs from all the others
        when `n` is no power of two.
    """
    return RotatingSchedule(name="matching", world_size=world_size, seed=seed, rotate=rotate)


def complete(world_size: int, *, seed: int = 0, rotate: bool = True) -> RotatingSchedule:
    r"""Every pair meets exactly once a period: a round-robin tournament.

    $p - 1$ rounds when the world size $p$ is even; $p$ when it is odd, each rank sitting out
    once. The rounds are those of the circle method in a shuffled order, which mixes in a few
    rounds what the usual order takes the whole period for. Each period has the next seeded
    relabelling.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Arguments and errors are those of `by_name`.

    Example:
        >>> schedule = complete(4, rotate=False)
        >>> [schedule.peers(round, rank=0).send_to for round in range(schedule.period)]
        [3, 2, 1]
    """
    return RotatingSchedule(name="complete", world_size=world_size, seed=seed, rotate=rotate)


def ring(world_size: int, *, seed: int = 0, rotate: bool = False) -> RotatingSchedule:
    """The ring, for comparison and for networks that are rings; static unless `rotate` is set.

    Rank `r` meets its neighbours `r + 1` and `r - 1` in turns, one a round. The ring is coloured
    into matchings: 2 when the world size is even; 3 when it is odd, the third being the one edge
    that closes the ring. Mixing takes on the order of world size squared rounds.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Arguments and errors are those of `by_name`.

    Example:
        >>> [ring(6).peers(round, rank=0).send_to for round in range(4)]
        [1, 5, 1, 5]
    """
    return RotatingSchedule(name="ring", world_size=world_size, seed=seed, rotate=rotate)
