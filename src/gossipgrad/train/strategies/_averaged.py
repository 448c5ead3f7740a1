"""Local steps, and every so many of them an exact average of all replicas."""

import math
import sys
from dataclasses import replace
from typing import Literal

import gossipgrad as gg
from gossipgrad.errors import GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart

from ._consensus import InSession, consensus_evaluation
from ._stopping import explain, is_asked_of_any
from ._strategy import Replica, Setting, Strategy, Traffic, all_ranks

AVERAGED = "2 (p - 1) / p of what is averaged"


class Averaged(InSession):
    """Every rank trains on its own, and every `every` steps all become their exact average.

    The average is that of a gossip session without partners, which has a consensus at any step.

    When a peer dies, the next step of the others raises, and so the run ends. When any rank has the
    signal to stop, all stop after the next average. Exposed time is that
    of the averages, all of it, the wait for slower ranks included. Bytes are those of ring
    all-reduces of what was averaged, computed and not counted.

    Args:
        replica: What this rank trains.
        every: Steps between two averages.
        payload: What is averaged: weights, or the optimizers' moments, too.
        group: The ranks, in a group that becomes this object's.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        every: int,
        payload: Literal["weights", "weights+state"],
        group: gg.Group,
    ) -> None:
        self._stop, self._every = replica.stop, every
        session = gg.gossip(
            replica.model,
            replica.optimizers,
            mode="sync",
            every=sys.maxsize,  # no round of gossip ever ends
            average_every=every,
            payload=payload,
            process_group=group,
            recorder=replica.spans,
            heartbeats=None,  # every average needs every rank
        )
        super().__init__(replica.model, session)

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        """Whether all stop after the average that was just made, since one of them is asked to."""
        if self._session.position % self._every:
            return False
        try:
            return is_asked_of_any(self._stop)
        except RuntimeError as error:
            raise explain(error, "an average over all ranks") from error

    def begin_step(self) -> None:
        """End the run if a peer is gone; see `RunningStrategy.begin_step`."""
        if self._session.group.broken is not None:
            raise explain(GossipError(self._session.group.broken), "an average over all ranks")

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks."""
        try:
            return consensus_evaluation(self._session, self.model, test, final=final)
        except GossipError as error:
            raise explain(error, "an average over all ranks") from error

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        return replace(super().traffic(), outcomes={})


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
        )
