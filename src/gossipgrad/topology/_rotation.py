"""Relabellings of ranks by a seeded hash, the same on every platform."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt64

from ._schedule import Ranks

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
