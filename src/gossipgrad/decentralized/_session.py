"""A gossip session: weights, optimizer state and gradients as flows of the engine."""

from collections.abc import Sequence
from typing import Any

import torch

from gossipgrad.decentralized._settings import (
    GossipSettings,
    Gradients,
    GradientsAndWeights,
    WeightsAndState,
)
from gossipgrad.engine import (
    Entry,
    Flow,
    Phase,
    Session,
    Sync,
    gradient_entries,
    state_entries,
    weight_entries,
)

__all__ = ["GossipSession"]


class GossipSession(Session):
    """What `gossip()` and `join()` return: mixes replicas behind the user's own training loop.

    Use it as a context manager or call `close()`. Leaving the context by an exception closes
    without waiting.
    """

    @torch.no_grad()
    def _make_flows(self) -> list[Flow]:
        """Weights, then optimizer state and gradients where the payload has them.

        Weights that do not travel are there all the same, for averages.

        Raises:
            ValueError: If something that travels is complex, sparse or of a type without average.
            GossipError: If it cannot be found out what state an optimizer keeps.
        """
        of, replica = self.settings, self.replica
        assert isinstance(of, GossipSettings)
        if not replica.trained:
            raise ValueError(
                "the optimizers train no parameter (all are frozen, or there are none): gossip has "
                "nothing to mix"
            )
        after = isinstance(of.mode, Sync) or isinstance(of.payload, GradientsAndWeights)
        phase = Phase.AFTER_UPDATE if after else Phase.ACROSS
        is_of_gradients = isinstance(of.payload, Gradients)
        flows = self._flows_of(
            [],
            "weights",
            Phase.NEVER if is_of_gradients else phase,
            weight_entries(replica.trained),
            in_consensus=True,
            mask=of.compress,
            seed=of.seed,
        )
        if isinstance(of.payload, WeightsAndState):
            entries = state_entries(replica.trained, replica.optimizers)
            flows += self._flows_of(flows, "state", phase, entries, every=of.payload.every)
        if isinstance(of.payload, Gradients | GradientsAndWeights):
            entries = gradient_entries(replica.trained)
            flows += self._flows_of(flows, "gradients", Phase.BEFORE_UPDATE, entries)
        return flows

    def _flows_of(
        self,
        before: Sequence[Flow],
        name: str,
        phase: Phase,
        entries: Sequence[Entry],
        **options: Any,
    ) -> list[Flow]:
        """A flow for each device, numbered behind those before."""
        of = self.settings
        by_device: dict[torch.device, list[Entry]] = {}
        for entry in entries:
            pieces = entry.pieces(of.bucket_bytes)
            by_device.setdefault(entry.parameter.device, []).extend(pieces)
        first = sum(len(flow.buckets) for flow in before)
        flows: list[Flow] = []
        for pieces in by_device.values():
            flow = Flow(
                name,
                phase,
                pieces,
                first_bucket=first,
                bucket_bytes=of.bucket_bytes,
                wire_dtype=of.wire_dtype,
                snapshots=of.snapshots,
                **options,
            )
            first += len(flow.buckets)
            flows.append(flow)
        return flows
