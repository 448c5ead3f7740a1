"""Schedules that are a rule on positions, with the ranks relabelled after every period."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from ._relabelling import identity, relabelling
from ._schedule import NOBODY, Schedule, check_seed

Positions = Int[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatingSchedule(Schedule):
    """A rule "position x meets position y in turn k", played on one relabelling after another.

    Round `t` is turn `t mod period` of the relabelling with index `t // period`. Without
    rotation every rank stays at the position of its own number.
    """

    seed: int = 0
    """Picks the sequence of relabellings; the same on all ranks."""
    rotate: bool = True
    """Whether each period stands on a new relabelling."""

    def __post_init__(self) -> None:
        # No super(): a dataclass with slots is a copy of the class that super() would look up.
        Schedule.__post_init__(self)
        check_seed(self.seed)

    @abstractmethod
    def _meet(self, turn: int, position: Positions) -> tuple[Positions, Positions]:
        """Where the given positions send to and receive from.

        Naming itself or a position outside 0 to world size - 1 means that it sits out.
        """

    def _peers_of(
        self, round: int, ranks: Int[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        index, turn = divmod(round, self.period)
        if self.rotate:
            labels = relabelling(self.world_size, self.seed, index)
        else:
            labels = identity(self.world_size)
        position = labels.position_of[ranks]
        send_to, recv_from = self._meet(turn, position)
        return (
            _ranks_at(send_to, position, labels.rank_at),
            _ranks_at(recv_from, position, labels.rank_at),
        )

    def describe(self) -> dict:
        """What makes this schedule the one it is, in plain JSON; see `Schedule.describe`.

        The seed is None when nothing rotates: it plays no part then.
        """
        return {
            "name": self.name,
            "world_size": self.world_size,
            "rotate": self.rotate,
            "seed": self.seed if self.rotate else None,
        }


def _ranks_at(
    met: Positions, position: Positions, rank_at: Int[np.ndarray, " rank"]
) -> Int[np.ndarray, " n"]:
    sits_out = (met == position) | (met < 0) | (met >= len(rank_at))
    return np.where(sits_out, NOBODY, rank_at[np.where(sits_out, 0, met)])


def ceil_log2(world_size: int) -> int:
    """The rounds that doubling takes from 1 to `world_size`, at least 1."""
    return max(1, (world_size - 1).bit_length())
