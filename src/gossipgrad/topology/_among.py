"""Schedules after ranks have died or joined: the same rule for the living ranks."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from ._repeated import Repeated
from ._rules import RotatingSchedule, takes_hypercube
from ._schedule import NOBODY, Ranks, Schedule
from ._weighted import Weighted


@dataclass(frozen=True, kw_only=True, slots=True)
class Among(Schedule):
    """See `among`."""

    inner: Schedule
    """The schedule of positions in `living`, or of the ranks themselves."""
    living: tuple[int, ...]
    """The ranks that take part, ascending."""
    relabelled: bool
    """Whether `inner` uses positions in `living`."""

    @property
    def period(self) -> int:
        """The period of the schedule among the living ranks."""
        return self.inner.period

    @property
    def symmetric(self) -> bool:
        """Whether partners send to each other."""
        return self.inner.symmetric

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        send_to, recv_from = self.inner.round_peers(round)
        return self._to_ranks(send_to), self._to_ranks(recv_from)

    def _to_ranks(self, met: Int[np.ndarray, " position"]) -> Ranks:
        living = np.array(self.living, np.int64)
        ranks = np.full(self.world_size, NOBODY, np.int64)
        if self.relabelled:
            ranks[living] = np.where(met == NOBODY, NOBODY, living[met])
        else:
            ranks[living] = np.where(np.isin(met[living], living), met[living], NOBODY)
        return ranks

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """See `Schedule.round_weights`."""
        weights = self.inner.round_weights(round, default)
        if not self.relabelled:
            return weights
        of_all = np.full(self.world_size, default)
        of_all[list(self.living)] = weights
        return of_all

    def describe(self) -> dict:
        """Return the identity of this schedule; see `Schedule.describe`."""
        return {
            "name": self.name,
            "world_size": self.world_size,
            "living": list(self.living),
            "inner": self.inner.describe(),
        }


def among(schedule: Schedule, living: Collection[int]) -> Schedule:
    """Return the schedule among the living ranks, after others have died or joined.

    A rule that takes any number of ranks runs among the living ones, each at its position among
    them, with the same seed: no rank is left out, and mixing is as fast as in a world of that size.
    A hypercube becomes a matching if the number is not a power of two. A graph or a matrix is
    unchanged, and a rank with a dead partner sits the round out: whether the others are still
    connected depends on the graph.

    Args:
        schedule: for all ranks of the start, dead ones included; not itself made here.
        living: the ranks that take part, at least one; the same on all of them. Joiners have
            numbers from the world size up.

    Returns:
        The schedule, with the ranks' own numbers. Its world size is that of `schedule`, or larger
        by the joiners, and dead ranks sit out. It is `schedule` itself if all ranks live and none
        has joined.

    Raises:
        ValueError: when no rank is left, a rank is negative, or one has joined a graph or a matrix.

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
    if isinstance(schedule, Weighted):
        if ranks[-1] >= schedule.world_size:
            raise ValueError(f"rank {ranks[-1]} has joined, and what it counts is not known")
        return replace(schedule, inner=among(schedule.inner, ranks))
    if isinstance(schedule, Repeated):
        paced = among(schedule.inner, ranks)
        return replace(schedule, world_size=paced.world_size, inner=paced)
    p, n = max(schedule.world_size, ranks[-1] + 1), len(ranks)
    rotates = isinstance(schedule, RotatingSchedule)
    if ranks[0] < 0 or (not rotates and p > schedule.world_size):
        raise ValueError(
            f"rank {ranks[0] if ranks[0] < 0 else ranks[-1]} is outside world size "
            f"{schedule.world_size}: ranks run from 0 to {schedule.world_size - 1}"
        )
    if n == p == schedule.world_size:
        return schedule
    if not rotates:
        return Among(name="among", world_size=p, inner=schedule, living=ranks, relabelled=False)
    unfit = schedule.name == "hypercube" and not takes_hypercube(n)
    inner = replace(schedule, world_size=n, name="matching" if unfit else schedule.name)
    return Among(name="among", world_size=p, inner=inner, living=ranks, relabelled=True)
