"""Local steps, and every so many of them an exact average of all replicas."""

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.errors import GossipError
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._result import RunStopped
from gossipgrad.train._spans import StepSpans

from ._consensus import consensus_evaluation, session_traffic
from ._lost import explained
from ._stop_together import StopTogether
from ._strategy import Strategy, Traffic, alone


class Averaged(Strategy):
    """Every rank trains on its own, and every `every` steps all become their exact average.

    The average is that of a gossip session without partners: its ranks may stop at unequal steps
    and still agree on one consensus, which torch's `PeriodicModelAverager` cannot (its all-reduce
    would meet whatever the stopped rank does next).

    When a peer dies, the next step of the others raises, and so the run ends. Exposed time is that
    of the averages, all of it, the wait for slower ranks included. Bytes are those of ring
    all-reduces of what was averaged, computed and not counted.

    Args:
        model: The replica.
        optimizers: Train it.
        every: Steps between two averages.
        payload: What is averaged: weights, or the optimizers' moments, too.
        group: The ranks, in a group that becomes this object's.
        stop: Set when the run is told to stop.
        spans: Gets spans of the averages.
        stops_together: Whether ranks that are told to stop do so after as many steps, for states
            that belong together; else at once.
    """

    replicas_differ = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        every: int,
        payload: Literal["weights", "weights+state"],
        group: gg.Group,
        stop: threading.Event,
        spans: StepSpans,
        stops_together: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._stop = stop
        self._accord: StopTogether | None = None
        self._session = gg.gossip(
            model,
            optimizers,
            mode="sync",
            every=sys.maxsize,  # no round of gossip ever comes to its end
            average_every=every,
            payload=payload,
            process_group=group,
            recorder=spans,
            heartbeats=None,  # every average needs every rank
        )
        if stops_together:
            self._accord = StopTogether(
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
        """What every rank has; see `Strategy.agree`."""
        return self._session.group.all_gather_object(value)

    def agree_at_end(self, value: Any) -> list[Any]:
        """What every rank has; see `Strategy.agree_at_end`."""
        return self._session.agree(value)

    def stops_before(self, step: int) -> bool:
        """At once, or together with the others; see `Strategy.stops_before`."""
        return self._accord is None or self._accord.stops_now()

    def begin_step(self) -> None:
        """End the run if a peer is gone; see `Strategy.begin_step`."""
        if self._session.group.broken is not None:
            raise self._explained(GossipError(self._session.group.broken))

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks; alone if the stop came in between."""
        try:
            return consensus_evaluation(self._session, self.model, test, final=final)
        except GossipError as error:
            lost = self._explained(error)
            if not isinstance(lost, RunStopped):
                raise lost from error
            self.notes.append(f"no consensus: {error}")
        return alone(self.model, test, final=True, is_consensus=False)

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        return replace(session_traffic(self._session), outcomes={})

    def close(self) -> None:
        """Leave the session."""
        if self._accord is not None:
            self._accord.close()
        self._session.close()

    def _explained(self, error: RuntimeError) -> RuntimeError:
        return explained(error, self._stop, "an average over all ranks")


class EveryLogP(Averaged):
    """Replicas are averaged every `ceil(log2 p)` steps: all-reduce's cost, spread over as many.

    The baseline of that name in GossipGraD's evaluation: after as many steps gossip, too, has
    spread what each rank knows. What the paper averages is not known to this project. The authors'
    code averages weights and momentum (with an option for the number of steps), and so does this.

    References:
        Daily et al., GossipGraD, arXiv:1803.05880, and the code of its authors. Deviations: (1)
        their code multiplies the sum by 1/2 whatever p is, which is the mean for two ranks alone;
        here it is the mean; (2) Adam's moments are averaged like momentum.
    """

    @staticmethod
    def steps(world_size: int) -> int:
        """Steps between two averages.

        Example:
            >>> [EveryLogP.steps(p) for p in (1, 2, 3, 4, 5, 8, 128)]
            [1, 1, 2, 2, 3, 3, 7]
        """
        return max(1, math.ceil(math.log2(world_size)))

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        group: gg.Group,
        stop: threading.Event,
        spans: StepSpans,
        stops_together: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizers,
            every=self.steps(group.world_size),
            payload="weights+state",
            group=group,
            stop=stop,
            spans=spans,
            stops_together=stops_together,
        )
