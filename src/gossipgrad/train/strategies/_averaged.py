"""Local steps, and every so many of them an exact average of all replicas."""

import math
import sys
from dataclasses import replace
from typing import Any, Literal

import gossipgrad as gg
from gossipgrad.errors import GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._result import RunStopped

from ._consensus import consensus_evaluation, session_traffic
from ._stopping import RoundStop, explain
from ._strategy import Replica, RunningStrategy, Setting, Strategy, Traffic, all_ranks, alone

AVERAGED = "2 (p - 1) / p of what is averaged"


class Averaged(RunningStrategy):
    """Every rank trains on its own, and every `every` steps all become their exact average.

    The average is that of a gossip session without partners: its ranks may stop at unequal steps
    and still agree on one consensus, which torch's `PeriodicModelAverager` cannot (its all-reduce
    would meet whatever the stopped rank does next).

    When a peer dies, the next step of the others raises, and so the run ends. Exposed time is that
    of the averages, all of it, the wait for slower ranks included. Bytes are those of ring
    all-reduces of what was averaged, computed and not counted.

    Args:
        replica: What this rank trains.
        every: Steps between two averages.
        payload: What is averaged: weights, or the optimizers' moments, too.
        group: The ranks, in a group that becomes this object's.
        stops_together: Whether ranks that are told to stop do so after as many steps, for states
            that belong together; else at once.
    """

    replicas_differ = True

    def __init__(
        self,
        replica: Replica,
        *,
        every: int,
        payload: Literal["weights", "weights+state"],
        group: gg.Group,
        stops_together: bool = False,
    ) -> None:
        super().__init__()
        self.model = replica.model
        self._stop = replica.stop
        self._stopper: RoundStop | None = None
        self._session = gg.gossip(
            replica.model,
            replica.optimizers,
            mode="sync",
            every=sys.maxsize,  # no round of gossip ever comes to its end
            average_every=every,
            payload=payload,
            process_group=group,
            recorder=replica.spans,
            heartbeats=None,  # every average needs every rank
        )
        if stops_together:
            self._stopper = RoundStop(
                self._session.group,
                lambda: self._session.group.members,
                lambda: self._session.position // every,
                lambda here: here + 1,  # all wait for all
            )

    @property
    def session(self) -> gg.GossipSession:
        """The session that averages."""
        return self._session

    def agree(self, value: Any) -> list[Any]:
        """What every rank has; see `RunningStrategy.agree`."""
        return self._session.group.all_gather_object(value)

    def agree_at_end(self, value: Any) -> list[Any]:
        """What every rank has; see `RunningStrategy.agree_at_end`."""
        return self._session.agree(value)

    def should_stop(self, step: int) -> bool:
        """At once, or together with the others; see `RunningStrategy.should_stop`."""
        return self._stopper is None or self._stopper.should_stop()

    def begin_step(self) -> None:
        """End the run if a peer is gone; see `RunningStrategy.begin_step`."""
        if self._session.group.broken is not None:
            raise self._explain(GossipError(self._session.group.broken))

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks; alone if the stop came in between."""
        try:
            return consensus_evaluation(self._session, self.model, test, final=final)
        except GossipError as error:
            lost = self._explain(error)
            if not isinstance(lost, RunStopped):
                raise lost from error
            self.notes.append(f"no consensus: {error}")
        return alone(self.model, test, final=True, is_consensus=False)

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        return replace(session_traffic(self._session), outcomes={})

    def close(self) -> None:
        """Leave the session."""
        if self._stopper is not None:
            self._stopper.close()
        self._session.close()

    def _explain(self, error: RuntimeError) -> RuntimeError:
        return explain(error, self._stop, "an average over all ranks")


class EveryLogP(Strategy):
    """Replicas are averaged every `ceil(log2 p)` steps: all-reduce's cost, spread over as many.

    The baseline of that name in GossipGraD's evaluation: after as many steps gossip, too, has
    spread what each rank knows. What the paper averages is not known to this project. The authors'
    code averages weights and momentum (with an option for the number of steps), and so does this.

    References:
        Daily et al., GossipGraD, arXiv:1803.05880, and the code of its authors. Deviations: (1)
        their code multiplies the sum by 1/2 whatever p is, which is the mean for two ranks alone;
        here it is the mean; (2) Adam's moments are averaged like momentum.
    """

    name = "every-log-p"
    help = "local steps, all averaged every ceil(log2 p)"
    bytes_are = f"computed: ring all-reduce, {AVERAGED}"

    @staticmethod
    def steps(world_size: int) -> int:
        """Steps between two averages.

        Example:
            >>> [EveryLogP.steps(p) for p in (1, 2, 3, 4, 5, 8, 128)]
            [1, 1, 2, 2, 3, 3, 7]
        """
        return max(1, math.ceil(math.log2(world_size)))

    def build(self, replica: Replica, setting: Setting, options: None) -> Averaged:
        """Begin to train in local steps."""
        group = all_ranks()
        return Averaged(
            replica,
            every=self.steps(group.world_size),
            payload="weights+state",
            group=group,
            stops_together=setting.checkpoint_every is not None,
        )
