"""Gossip, as a strategy of the loop."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.errors import GossipError
from gossipgrad.train._config import GossipConfig
from gossipgrad.train._evaluate import Evaluation, TestPart, copy_of
from gossipgrad.train._spans import StepSpans

from ._strategy import Strategy, Traffic, alone


class Gossip(Strategy):
    """A gossip session: one partner a step, in the background.

    When a rank dies the others train on. The consensus needs all ranks, so from then on each
    evaluates and exports its own replica.
    """

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
            mode=options.mode,
            payload=options.payload,
            every=options.every,
            average_every=options.average_every,
            wire_dtype=None if options.wire_dtype is None else getattr(torch, options.wire_dtype),
            seed=seed,
            recorder=spans,
        )

    def evaluate(self, test: TestPart, *, final: bool) -> Evaluation:
        """Evaluate the consensus, shared out over the ranks; the own replica once one is gone.

        Ranks may come here after unequal steps, some for the last time and some not: all then take
        it for the last.
        """
        if self._all_here and self._session.stats().outcomes.get("dead_peer"):
            # Not even tried: partners would settle for it, and mix no more until it came about.
            self._all_here = False
            self.notes.append("no consensus: a partner has died, and the average needs all ranks")
        if self._all_here:
            try:
                with self._session.consensus():
                    group = self._session.group
                    final = any(group.all_gather_object(final))
                    correct = group.all_reduce_(test.count_share(self.model))
                    return Evaluation(
                        accuracy=int(correct) / test.num_labels,
                        is_consensus=True,
                        consensus_distance=self._session.stats().consensus_distance,
                        final=final,
                        weights=copy_of(self.model) if final else {},
                    )
            except GossipError as error:
                self._all_here = False
                self.notes.append(f"no consensus: {error}")
        return alone(self.model, test, final=final, is_consensus=False)

    def traffic(self) -> Traffic:
        """What the session counted."""
        stats = self._session.stats()
        return Traffic(
            bytes_sent=stats.bytes_sent,
            exposed_seconds=stats.exposed_seconds,
            mixing_seconds=stats.mixing_seconds,
            extra_memory_bytes=stats.extra_memory_bytes,
            consensus_distance_estimate=stats.consensus_distance_estimate,
            outcomes=dict(stats.outcomes),
        )

    def close(self) -> None:
        """Leave the session; partners skip this rank from now on."""
        self._session.close()
