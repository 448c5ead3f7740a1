"""A schedule for those who live: the same rule on their positions, and who stands on them."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from ._matching import Matching
from ._rotating import RotatingSchedule
from ._schedule import NOBODY, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Among(Schedule):
    """See `among`."""

    name: ClassVar[str] = "among"

    inner: Schedule
    """Who meets whom: of the positions, or of the ranks themselves."""
    living: tuple[int, ...]
    """The ranks that take part, rising."""
    relabelled: bool
    """Whether `inner` speaks of positions in `living`."""

    @property
    def period(self) -> int:
        """That of the schedule for as many as are left."""
        return self.inner.period

    @property
    def symmetric(self) -> bool:
        """Whether partners send to each other."""
        return self.inner.symmetric

    def _peers_of(
        self, round: int, ranks: Int[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        send_to, recv_from = self.inner.round_peers(round)
        ends = self._spread(send_to), self._spread(recv_from)
        return ends[0][ranks], ends[1][ranks]

    def _spread(self, met: Int[np.ndarray, " position"]) -> Int[np.ndarray, " rank"]:
        living = np.array(self.living, np.int64)
        spread = np.full(self.world_size, NOBODY, np.int64)
        if self.relabelled:
            spread[living] = np.where(met == NOBODY, NOBODY, living[met])
        else:
            spread[living] = np.where(np.isin(met[living], living), met[living], NOBODY)
        return spread

    def _weights_of(
        self, round: int, ranks: Int[np.ndarray, " n"], default: float
    ) -> Float[np.ndarray, " n"]:
        weights = self.inner.round_weights(round, default)
        if not self.relabelled:
            return weights[ranks]
        spread = np.full(self.world_size, default)
        spread[list(self.living)] = weights
        return spread[ranks]

    def describe(self) -> dict:
        """What makes this schedule the one it is, in plain JSON; see `Schedule.describe`."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "living": list(self.living),
            "inner": self.inner.describe(),
        }


def among(schedule: Schedule, living: Collection[int]) -> Schedule:
    """The schedule when some ranks are gone, or others have joined: for those who live.

    A rule that takes any number is played among as many as live, each on the position that its
    rank has among the living, with the same seed: nobody is left out, and mixing is as fast as in
    a world of that size. A hypercube becomes a matching where the number is no power of two. A
    graph or a matrix that was given stays as it is, and who would meet a rank that is gone sits the
    round out: whether the rest hangs together is up to the graph.

    Args:
        schedule: for all ranks of the start, those that are gone included; not itself made here.
        living: the ranks that take part, at least one; the same on all of them. Those who have
            joined have numbers beyond the world size.

    Returns:
        The schedule, with the ranks' own numbers; its world size is that of `schedule`, or more by
        those who joined, and ranks that are gone sit out. It is `schedule` itself if nobody is gone
        and nobody has joined.

    Raises:
        ValueError: when nobody is left, a rank is negative, or one has joined a graph or a matrix.

    Example:
        >>> from gossipgrad.topology import matching
        >>> left = among(matching(8, rotate=False), living=[1, 4, 6, 7])
        >>> [left.peers(round, rank=1).send_to for round in range(left.period)]
        [4, 7]
        >>> among(matching(2), living=[0, 1, 2]).world_size
        3
    """
    ranks = tuple(sorted(set(living)))
    if not ranks:
        raise ValueError("nobody is left: name at least one living rank")
    p, n = max(schedule.world_size, ranks[-1] + 1), len(ranks)
    given = not isinstance(schedule, RotatingSchedule)
    if ranks[0] < 0 or (given and p > schedule.world_size):
        raise ValueError(
            f"rank {ranks[0] if ranks[0] < 0 else ranks[-1]} is outside world size "
            f"{schedule.world_size}: ranks run from 0 to {schedule.world_size - 1}"
        )
    if n == p == schedule.world_size:
        return schedule
    if not isinstance(schedule, RotatingSchedule):
        return Among(world_size=p, inner=schedule, living=ranks, relabelled=False)
    if schedule.name == "hypercube" and n & (n - 1):
        inner: Schedule = Matching(world_size=n, seed=schedule.seed, rotate=schedule.rotate)
    else:
        inner = replace(schedule, world_size=n)
    return Among(world_size=p, inner=inner, living=ranks, relabelled=True)
