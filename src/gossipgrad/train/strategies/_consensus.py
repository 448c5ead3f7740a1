"""What strategies with a session of their own share: evaluating the consensus, counting bytes."""

from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import nn

from gossipgrad.engine import Session
from gossipgrad.errors import GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart, mean_of

from ._strategy import RunningStrategy, Traffic, ring_bytes

TRIES = 3  # one that dies in the middle of each is not to be expected


class InSession(RunningStrategy):
    """A session keeps the replicas together."""

    replicas_differ = True

    def __init__(self, model: nn.Module, session: Session) -> None:
        super().__init__()
        self.model = model
        self._session = session

    @property
    def session(self) -> Session:
        """The session."""
        return self._session

    def agree(self, value: Any) -> list[Any]:
        """What every member that lives has; see `RunningStrategy.agree`."""
        for _ in range(TRIES - 1):
            with suppress(GossipError):
                return self._session.agree(value)
        return self._session.agree(value)

    def no_sync(self) -> AbstractContextManager[None]:
        """That of the session."""
        return self._session.no_sync()

    def traffic(self) -> Traffic:
        """What the session has counted, and what its exact averages have cost."""
        stats, world_size = self._session.stats(), self._session.world_size
        return Traffic(
            bytes_sent=stats.bytes_sent + ring_bytes(stats.averaged_bytes, world_size),
            exposed_seconds=stats.exposed_seconds + stats.averaging_seconds,
            mixing_seconds=stats.mixing_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
            consensus_distance_estimate=stats.consensus_distance_estimate,
            outcomes=dict(stats.outcomes),
            late_rounds=stats.late_rounds,
            void_rounds=stats.void_rounds,
        )

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        self._session.close()


class MissedError(GossipError):
    """The others are at a later evaluation: this one came about for them, and broke here."""

    def __init__(self, message: str, *, latest: float = 0) -> None:
        super().__init__(message)
        self.latest = latest


def consensus_evaluation(
    session: Session,
    model: nn.Module,
    test: TestPart,
    *,
    epoch: float,
    final: bool,
) -> Evaluation:
    """Evaluate the consensus, shared out over the living ranks; a collective of these.

    Ranks may come here after unequal steps, some for the last time and some not: all then take it
    for the last. A rank at an earlier evaluation than others gets a `MissedError`, and these wait
    until it comes for theirs.
    """
    while True:
        with session.consensus():
            group = session.group
            came = group.all_gather_object([epoch, final])
            latest = max(other for other, _ in came)
            if epoch < latest:
                raise MissedError(
                    f"the evaluation after {epoch:g} epochs broke on rank {group.rank}; others are "
                    f"at that after {latest:g}",
                    latest=latest,
                )
            if any(other < latest for other, _ in came):
                continue
            # The evaluation's sum is the last collective: where it comes about on some ranks and
            # breaks on others, none of the former waits in another one for the latter.
            distance = session.consensus_distance()
            total = group.all_reduce_(test.sum_share(model, group.members))
            last = any(wanted for _, wanted in came)
            accuracy = mean_of(total)
            return Evaluation(
                accuracy=accuracy,
                is_consensus=True,
                consensus_distance=distance,
                final=last,
                weights=test.weights(model, accuracy, final=last),
            )
