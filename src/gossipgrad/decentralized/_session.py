"""A gossip session: weights, optimizer state and gradients as flows of the engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.decentralized._adamw import GossipAdamW
from gossipgrad.decentralized._outer import OuterOptimizer
from gossipgrad.decentralized._settings import (
    GossipSettings,
    Gradients,
    GradientsAndWeights,
    WeightsAndState,
    check_moments,
    travels,
)
from gossipgrad.engine import (
    Bucket,
    Flow,
    Phase,
    Replica,
    Session,
    Stats,
    Sync,
    gradient_entries,
    state_entries,
    weight_entries,
)

__all__ = ["GossipSession"]

Closure = Callable[[], Any]


class GossipSession(Session):
    """The session that `gossip()` and `join()` return; mixes replicas in the user's own loop.

    Use it as a context manager or call `close()`. Leaving the context by an exception closes
    without waiting.

    With local steps, calls in the middle of a period (`consensus()`, `average_()`, `state_dict()`)
    use the local weights, so that no step is lost; at the end of a period these are the outer
    weights. `broadcast_()` begins a period, with an outer momentum of zero.
    """

    can_grow = True

    def __init__(self, replica: Replica, settings: GossipSettings, **options: Any) -> None:
        self._outer = None if settings.outer is None else OuterOptimizer(settings.outer)
        super().__init__(replica, settings, **options)

    def stats(self) -> Stats:
        """Return this rank's counters; no communication."""
        stats = super().stats()
        if self._outer is None:
            return stats
        return replace(
            stats, extra_memory_bytes=stats.extra_memory_bytes + self._outer.memory_bytes
        )

    @torch.no_grad()
    def _make_flows(self) -> list[Flow]:
        """Create flows of weights, then optimizer state and gradients if the payload has them."""
        of, replica = self.settings, self.replica
        share = None if self._island is None else self._island.share
        assert isinstance(of, GossipSettings)
        if not replica.trained:
            raise ValueError(
                "the optimizers train no parameter (all are frozen, or there are none): gossip has "
                "nothing to mix"
            )
        after = isinstance(of.mode, Sync) or isinstance(of.payload, GradientsAndWeights)
        phase = Phase.AFTER_UPDATE if after else Phase.ACROSS
        flows = Flow.per_device(
            "weights",
            Phase.NEVER if isinstance(of.payload, Gradients) else phase,
            weight_entries(replica.trained),
            of,
            in_consensus=True,
            mask=of.compress,
            seed=of.seed,
            share=share,
        )
        if isinstance(of.mode, Sync) and of.mode.momentum:
            if self._island is not None and not all(flow.is_sliced for flow in flows):
                raise ValueError(
                    f"momentum={of.mode.momentum} of mode sync, and the replica of an island is "
                    "sharded: ranks that repeat a shard would correct it differently where parts "
                    "are late. Use mode='sync'"
                )
            for bucket in (bucket for flow in flows for bucket in flow.buckets):
                bucket.begin_correction(of.mode.gain)
        if isinstance(of.payload, WeightsAndState):
            kept: set[str] = set()

            def is_sent(key: str) -> bool:
                kept.add(key)
                return travels(of.payload, key)

            state = state_entries(replica.trained, replica.optimizers, travels=is_sent)
            check_moments(of.payload, kept)
            if not state and of.payload.only is not None:
                warn(
                    f"payload {of.payload} sends weights alone: no optimizer keeps the state that "
                    "it names (SGD with momentum=0 keeps none). Use payload='weights'"
                )
            every = of.payload.every
            flows += Flow.per_device(
                "state", phase, state, of, behind=flows, every=every, share=share
            )
        if not travels(of.payload, "exp_avg") and any(
            isinstance(optimizer, GossipAdamW) for optimizer in replica.optimizers
        ):
            warn(
                f"GossipAdamW takes its second moment from the mixed momentum, and payload "
                f"{of.payload} mixes none: it is no better than torch.optim.AdamW then. Pass "
                "payload='weights+momentum'"
            )
        if isinstance(of.payload, Gradients | GradientsAndWeights):
            gradients = gradient_entries(replica.trained)
            flows += Flow.per_device("gradients", Phase.BEFORE_UPDATE, gradients, of, behind=flows)
        return flows

    @property
    def _buckets(self) -> list[Bucket]:
        """Return the buckets of the weights."""
        return [bucket for flow in self._weights for bucket in flow.buckets]

    def _begin(self) -> None:
        if self._outer is not None:
            self._outer.reset()
        super()._begin()

    def _adopt(self) -> None:
        super()._adopt()
        if self._outer is not None:
            self._outer.reset()

    def _before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        closure = super()._before_step(optimizer, closure)
        if self._outer is not None:
            self._outer.begin(self._buckets)  # the last round is fully mixed by now
        return closure

    def _after_update(self) -> None:
        if self._outer is not None and self._run.is_boundary:
            self._outer.step(self._buckets)

    def _family_state(self) -> dict[str, Any]:
        if self._outer is not None:
            return self._outer.state_dict(self._buckets)
        kept = [bucket.correction for bucket in self._buckets if bucket.correction is not None]
        return {"corrections": [c.to("cpu", copy=True) for c in kept]} if kept else {}

    def _load_family_state(self, state: Mapping[str, Any]) -> None:
        for bucket, correction in zip(self._buckets, state.get("corrections", ()), strict=False):
            if bucket.correction is not None:
                bucket.correction.copy_(correction)
        if self._outer is not None:
            self._outer.load_state_dict(state, self._buckets)
