"""A gossip session: weights, optimizer state and gradients as flows of the engine."""

import torch

from gossipgrad.decentralized._settings import (
    GossipSettings,
    Gradients,
    GradientsAndWeights,
    WeightsAndState,
    check_moments,
    travels,
)
from gossipgrad.engine import (
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
            ValueError: If something that travels is complex, sparse or of a type without average,
                or Adam's first moment would travel without its second.
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
        flows = Flow.deal(
            "weights",
            Phase.NEVER if isinstance(of.payload, Gradients) else phase,
            weight_entries(replica.trained),
            of,
            in_consensus=True,
            mask=of.compress,
            seed=of.seed,
        )
        if isinstance(of.payload, WeightsAndState):
            kept: set[str] = set()

            def is_sent(key: str) -> bool:
                kept.add(key)
                return travels(of.payload, key)

            state = state_entries(replica.trained, replica.optimizers, travels=is_sent)
            check_moments(of.payload, kept)
            flows += Flow.deal("state", phase, state, of, behind=flows, every=of.payload.every)
        if isinstance(of.payload, Gradients | GradientsAndWeights):
            gradients = gradient_entries(replica.trained)
            flows += Flow.deal("gradients", Phase.BEFORE_UPDATE, gradients, of, behind=flows)
        return flows
