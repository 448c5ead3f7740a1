"""The base of schedules: values that define the partners of every round."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Ranks = Int[np.ndarray, " rank"]
"""Ranks or positions, one for each rank."""
NOBODY = -1
"""Means "no partner" in arrays of ranks; `Peers` has None."""


class Peers(NamedTuple):
    """The partners of one rank in one round; both are None when it sits the round out."""

    send_to: int | None
    recv_from: int | None


class RoundPeers(NamedTuple):
    """The partners of every rank in one round: arrays indexed by rank, -1 for sitting out."""

    send_to: Ranks
    recv_from: Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(ABC):
    """The partners of each rank in round 0, 1, 2, ...: a frozen, hashable, picklable value.

    Nothing here communicates: each rank computes its partners of any round directly, and all ranks
    get the same pairs. In every round the sends form a permutation of the ranks that take part, so
    every mixing matrix is doubly stochastic and an exchange in which all messages arrive keeps the
    mean.

    A schedule does not depend on slow or dead ranks. If messages can be void, use a symmetric one:
    an exchange then counts on both ends or on neither, and the mean is kept.
    """

    name: str
    """Its name in `by_name`."""
    world_size: int
    """The number of ranks."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(
                f"world size {self.world_size} has no ranks: it must be 1 or more "
                "(torch.distributed.get_world_size() gives it)"
            )

    @property
    @abstractmethod
    def period(self) -> int:
        """The number of rounds after which the pattern repeats, on new labels if it rotates."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether in every round each rank receives from the rank it sends to."""

    @abstractmethod
    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        """Return the ranks that each rank sends to and receives from, `NOBODY` if it sits out."""

    @abstractmethod
    def describe(self) -> dict:
        """Return the identity of this schedule, as plain JSON.

        Ranks compare it before they start: it is equal if and only if they hold the same schedule.
        """

    def peers(self, round: int, rank: int) -> Peers:
        """Return the partners of `rank` in `round`.

        Args:
            round: 0 or more; any round is computed directly.
            rank: 0 to world size - 1.

        Returns:
            The ranks to send to and to receive from, None when this rank sits out.

        Raises:
            ValueError: when the round or the rank is out of range.

        Example:
            >>> from gossipgrad.topology import dissemination
            >>> dissemination(8, rotate=False).peers(round=1, rank=0)
            Peers(send_to=6, recv_from=2)
        """
        self._check_rank(rank)
        send_to, recv_from = (int(ranks[rank]) for ranks in self.round_peers(round))
        return Peers(
            None if send_to == NOBODY else send_to, None if recv_from == NOBODY else recv_from
        )

    def round_peers(self, round: int) -> RoundPeers:
        """Return the partners of every rank in `round`, as two arrays of shape `(world_size,)`.

        Raises:
            ValueError: when the round is out of range.
        """
        if not 0 <= round < 2**63:
            raise ValueError(f"round {round} is out of range: rounds count from 0 to 2**63 - 1")
        return RoundPeers(*self._peers_of_all(round))

    def weight(self, round: int, rank: int, default: float = 0.5) -> float:
        """Return the weight of the delta of `rank` in `round`: the default, unless from a matrix.

        Args:
            round: 0 or more.
            rank: 0 to world size - 1.
            default: the result for a schedule without its own weights.

        Raises:
            ValueError: when the rank is out of range.
        """
        self._check_rank(rank)
        return float(self.round_weights(round, default)[rank])

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """Return `weight` of every rank, shape `(world_size,)`; undefined where a rank sits out."""
        return np.full(self.world_size, default)

    def mixing_matrix(self, round: int, weight: float = 0.5) -> Float[np.ndarray, "rank rank"]:
        r"""Return the mixing matrix of `round`: $w_i' = \sum_j W_{ij} w_j$.

        Row $i$ holds `1 - weight` at $i$ and `weight` at the rank that $i$ receives from, or 1
        at $i$ when it sits out. Dense: for inspection, up to a few thousand ranks.

        Args:
            round: 0 or more.
            weight: the weight of the delta; a schedule from a matrix has its own.

        Returns:
            The matrix, shape `(world_size, world_size)`, doubly stochastic.

        Raises:
            ValueError: when the round is negative or the weight outside 0 to 1.

        Example:
            >>> from gossipgrad.topology import hypercube
            >>> hypercube(2).mixing_matrix(0, weight=0.25)
            array([[0.75, 0.25],
                   [0.25, 0.75]])
        """
        check_weight(weight)
        recv_from = self.round_peers(round).recv_from
        weights = self.round_weights(round, weight)
        matrix = np.eye(self.world_size)
        (taking_part,) = np.nonzero(recv_from != NOBODY)
        taken = weights[taking_part]
        matrix[taking_part, taking_part] = 1.0 - taken
        matrix[taking_part, recv_from[taking_part]] += taken
        return matrix

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside world size {self.world_size}: "
                f"ranks run from 0 to {self.world_size - 1}"
            )


def check_seed(seed: int) -> None:
    """Raise unless the seed fits the 64 bits that the hash takes."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is out of range: choose one from 0 to 2**64 - 1")


def check_weight(weight: float) -> None:
    """Raise unless the weight leaves a mixing matrix non-negative."""
    if not 0.0 <= weight <= 1.0:
        raise ValueError(
            f"weight {weight} is out of range: it is the share of the delta that a rank takes, "
            "0 to 1 (0.5 averages a pair)"
        )
