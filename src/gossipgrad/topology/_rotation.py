"""Rules on positions, with the ranks relabelled by a seeded hash after every period."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt64

from ._schedule import NOBODY, Ranks, Schedule, check_seed

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Relabelling(NamedTuple):
    """A permutation and its inverse, both read-only and of shape `(world_size,)`."""

    rank_at: Ranks
    """The rank at each position."""
    position_of: Ranks
    """The position of each rank."""


def splitmix64(values: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """One step of the SplitMix64 generator from each of the given states: a bijective hash.

    Arithmetic is modulo 2^64, which numpy's arrays do on every platform alike.

    References:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed = values + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=16)
def relabelling(world_size: int, seed: int, index: int) -> Relabelling:
    r"""The relabelling of period `index`: the stable argsort of a hash of (seed, index, rank).

    With $h$ = SplitMix64, rank $r$ has the key $h(h(h(seed) \oplus index) \oplus r)$ and the ranks
    are sorted by their keys. $h$ is a bijection, so no two keys are equal.

    Every rank computes this for any index directly, and all platforms compute the same. Each
    process caches the last few.
    """
    state = splitmix64(splitmix64(np.array([seed], np.uint64)) ^ np.uint64(index))
    keys = splitmix64(state ^ np.arange(world_size, dtype=np.uint64))
    rank_at = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    position_of = np.empty_like(rank_at)
    position_of[rank_at] = np.arange(world_size)
    rank_at.flags.writeable = position_of.flags.writeable = False
    return Relabelling(rank_at, position_of)


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

    @property
    def period(self) -> int:
        """`ceil(log2 world_size)`, at least 1, unless the rule has another."""
        return max(1, (self.world_size - 1).bit_length())

    @property
    def symmetric(self) -> bool:
        """True, unless the rule is directed."""
        return True

    @abstractmethod
    def _meet(self, turn: int, position: Ranks) -> tuple[Ranks, Ranks]:
        """Return the positions that each position sends to and receives from.

        A position sits out where it meets itself or a position outside 0 to world size - 1.
        """

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        index, turn = divmod(round, self.period)
        positions = np.arange(self.world_size, dtype=np.int64)
        if not self.rotate:
            rank_at = position_of = positions
        else:
            rank_at, position_of = relabelling(self.world_size, self.seed, index)
        send_to, recv_from = self._meet(turn, position_of)

        def ranks_at(met: Ranks) -> Ranks:
            sits_out = (met == position_of) | (met < 0) | (met >= self.world_size)
            return np.where(sits_out, NOBODY, rank_at[np.where(sits_out, 0, met)])

        return ranks_at(send_to), ranks_at(recv_from)

    def describe(self) -> dict:
        """Return what identifies this schedule; see `Schedule.describe`.

        The seed is None without rotation, which does not use it.
        """
        return {
            "name": self.name,
            "world_size": self.world_size,
            "rotate": self.rotate,
            "seed": self.seed if self.rotate else None,
        }
