"""What a schedule is: a value that answers who meets whom in every round."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int

NOBODY = -1
"""Stands for "no partner" in arrays of ranks; `Peers` says None."""


class Peers(NamedTuple):
    """Whom one rank meets in one round; both are None when it sits the round out."""

    send_to: int | None
    recv_from: int | None


class RoundPeers(NamedTuple):
    """Whom every rank meets in one round: arrays indexed by rank, -1 for sitting out."""

    send_to: Int[np.ndarray, " rank"]
    recv_from: Int[np.ndarray, " rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(ABC):
    """Who exchanges with whom in round 0, 1, 2, ...: a frozen, hashable, picklable value.

    Nothing here communicates: each rank works its partners out for itself, for any round
    directly, and all ranks arrive at the same pairs. In every round the sends form a
    permutation of the ranks that take part, so every mixing matrix is doubly stochastic and an
    exchange in which all messages arrive keeps the mean.

    A schedule knows nothing of slow or dead ranks. Where messages can be void use a symmetric
    one: there an exchange counts on both ends or on neither, and the mean survives.
    """

    name: ClassVar[str]
    """What `by_name` calls it."""

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
    def _peers_of(
        self, round: int, ranks: Int[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Where the given ranks send to and receive from, `NOBODY` where they sit out."""

    @abstractmethod
    def describe(self) -> dict:
        """What makes this schedule the one it is, in plain JSON.

        Equal on two ranks if and only if they hold the same schedule: what ranks compare before
        they start.
        """

    def _weights_of(
        self, round: int, ranks: Int[np.ndarray, " n"], default: float
    ) -> Float[np.ndarray, " n"]:
        return np.full(ranks.shape, default)

    def peers(self, round: int, rank: int) -> Peers:
        """Whom `rank` meets in `round`.

        Args:
            round: 0 or more; any round is answered directly.
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
        self._check_round(round)
        send_to, recv_from = self._peers_of(round, self._only(rank))
        return Peers(_none_if_nobody(send_to), _none_if_nobody(recv_from))

    def round_peers(self, round: int) -> RoundPeers:
        """Whom every rank meets in `round`, as two arrays.

        Returns:
            `send_to` and `recv_from`, each of shape `(world_size,)`, -1 for sitting out.

        Raises:
            ValueError: when the round is negative.
        """
        self._check_round(round)
        return RoundPeers(*self._peers_of(round, np.arange(self.world_size, dtype=np.int64)))

    def weight(self, round: int, rank: int, default: float = 0.5) -> float:
        """How much of the delta `rank` takes in `round`: the default, unless from a matrix.

        Args:
            round: 0 or more.
            rank: 0 to world size - 1.
            default: what a schedule without weights of its own answers.

        Raises:
            ValueError: when the round or the rank is out of range.
        """
        self._check_round(round)
        return float(self._weights_of(round, self._only(rank), default)[0])

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """`weight` of every rank, shape `(world_size,)`; it has no meaning for who sits out."""
        self._check_round(round)
        ranks = np.arange(self.world_size, dtype=np.int64)
        return self._weights_of(round, ranks, default)

    def mixing_matrix(self, round: int, weight: float = 0.5) -> Float[np.ndarray, "rank rank"]:
        r"""How each rank's value is made in `round`: $w_i' = \sum_j W_{ij} w_j$.

        Row $i$ holds `1 - weight` at $i$ and `weight` at the rank that $i$ receives from, or 1
        at $i$ when it sits out. Dense: meant for looking at, up to a few thousand ranks.

        Args:
            round: 0 or more.
            weight: how much of the delta is taken; a schedule from a matrix has its own.

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

    def _only(self, rank: int) -> Int[np.ndarray, " 1"]:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is outside world size {self.world_size}: "
                f"ranks run from 0 to {self.world_size - 1}"
            )
        return np.array([rank], np.int64)

    @staticmethod
    def _check_round(round: int) -> None:
        if not 0 <= round < 2**63:
            raise ValueError(f"round {round} is out of range: rounds count from 0 to 2**63 - 1")


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


def _none_if_nobody(ranks: Int[np.ndarray, " 1"]) -> int | None:
    rank = int(ranks[0])
    return None if rank == NOBODY else rank
