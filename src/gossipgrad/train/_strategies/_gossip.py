"""Gossip, as a strategy of the loop."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, Transport, ZeroMQTransport
from gossipgrad.errors import GossipError
from gossipgrad.train._config import GossipConfig
from gossipgrad.train._evaluate import Evaluation, TestPart
from gossipgrad.train._spans import StepSpans

from ._consensus import consensus_evaluation, session_traffic
from ._strategy import Strategy, Traffic, alone

_WAITING = {"overlap": gg.Overlap, "sync": gg.Sync, "lagged": gg.Lagged}


class Gossip(Strategy):
    """A gossip session: one partner a step, in the background.

    When a rank dies the others train on. The consensus needs all ranks, so from then on each
    evaluates and exports its own replica.
    """

    replicas_differ = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: GossipConfig,
        *,
        seed: int,
        spans: StepSpans,
    ) -> None:
        super().__init__()
        self.model = model
        self._all_here = True
        self._session = gg.gossip(
            model,
            optimizers,
            topology=options.topology,
            mode=_mode(options),
            payload=options.payload,
            every=options.every,
            average_every=options.average_every,
            wire_dtype=None if options.wire_dtype is None else getattr(torch, options.wire_dtype),
            seed=seed,
            transport="zeromq" if options.faults is None else _with_faults(options.faults),
            recorder=spans,
        )
        if options.faults is not None:
            self.notes.append(f"faults by script: {options.faults}")

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks; the own replica once one is gone."""
        if self._all_here and self._session.stats().outcomes.get("dead_peer"):
            # Not even tried: partners would settle for it, and mix no more until it came about.
            self._all_here = False
            self.notes.append("no consensus: a partner has died, and the average needs all ranks")
        if self._all_here:
            try:
                return consensus_evaluation(self._session, self.model, test, final=final)
            except GossipError as error:
                self._all_here = False
                self.notes.append(f"no consensus: {error}")
        return alone(self.model, test, final=final, is_consensus=False)

    def position(self, steps: int) -> int:
        """In mode stale the rounds of the session; see `Strategy.position`."""
        return self._session.position

    def traffic(self) -> Traffic:
        """What the session counted."""
        return session_traffic(self._session)

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        self._session.close()


def _mode(options: GossipConfig) -> gg.Stale | gg.Overlap | gg.Sync | gg.Lagged:
    if options.mode == "stale":
        return gg.Stale(max_staleness=options.max_staleness)
    return _WAITING[options.mode](
        deadline_seconds=options.deadline_seconds, floor_seconds=options.deadline_floor_seconds
    )


def _with_faults(script: str) -> Callable[[gg.Group], Transport]:
    faults = Faults.parse(script)
    return lambda group: FaultyTransport(ZeroMQTransport(group), faults)
