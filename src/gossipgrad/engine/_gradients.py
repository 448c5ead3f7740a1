"""Flows of gradients: send each bucket when backward has finished it, mix before the step."""

import time
from collections.abc import Sequence

from torch import Tensor, nn

from gossipgrad.comm import Outcome
from gossipgrad.engine._flow import Flow
from gossipgrad.engine._gradient_hooks import GradientHooks
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._transfer import Transfer
from gossipgrad.errors import GossipError

__all__ = ["GradientExchange"]


class GradientExchange:
    """Sends each bucket of gradients when it is complete, and mixes before the step.

    `g += weight * (received - sent)` for every gradient that exists here; a missing one is sent as
    zeros. The parameters have hooks until `remove`.

    Args:
        flows: The flows of phase `BEFORE_UPDATE`.
        rounds: Shared with the other flows of the same round.
    """

    def __init__(self, flows: Sequence[Flow], rounds: Rounds) -> None:
        self._rounds = rounds
        self._flows = flows
        self._transfers: dict[Flow, Transfer] = {}
        self._sent: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._names = {entry.parameter: entry.spec.name for flow in flows for entry in flow.entries}
        self._parameters = list(self._names)
        self._is_finished = False
        self._buckets = [(flow, place) for flow in flows for place in range(len(flow.buckets))]
        place_of = {parameter: place for place, parameter in enumerate(self._parameters)}
        self._hooks = GradientHooks(
            self._parameters,
            begin=self._begin,
            launch=self._launch,
            on_second=self._refuse_second,
            ordered=False,
        )
        self._hooks.regroup(
            [
                sorted({place_of[entry.parameter] for entry in flow.buckets[place].entries})
                for flow, place in self._buckets
            ]
        )

    @property
    def has_begun(self) -> bool:
        """Whether gradients of this step have been sent, and not mixed yet."""
        return self._hooks.began

    def enable(self, enabled: bool) -> None:
        """Set whether later backward passes send gradients."""
        self._hooks.enabled = enabled

    def finish(self) -> None:
        """Send remaining buckets, wait for the partner, and mix into `.grad`; once per step.

        Raises:
            GossipError: If a gradient was written after it was sent (clipped, unscaled, ...).
        """
        if self._is_finished:
            return
        if not self._hooks.began:
            self._hooks.open()
        self._check_unchanged()
        self._is_finished = True
        rounds = self._rounds
        try:
            for transfer in self._transfers.values():
                transfer.post_all()
                deadline = time.perf_counter() + rounds.longest_wait_seconds
                for place in sorted(transfer.exchanges):
                    if rounds.receive(transfer, place, deadline) is Outcome.LATE:
                        rounds.outcomes[Outcome.LATE] += 1
                    rounds.mix(transfer, place, transfer.delta(place))
        finally:
            # A gradient that arrives after its step is useless: late ones are cancelled.
            self._give_up()

    def end_step(self) -> None:
        """End the round after the optimizer used the gradients."""
        self._is_finished = False

    def remove(self) -> None:
        """Remove the hooks and cancel exchanges in flight."""
        self._hooks.remove()
        self._give_up()

    def _give_up(self) -> None:
        for transfer in self._transfers.values():
            transfer.cancel()
        self._transfers, self._sent = {}, {}
        self._hooks.finish()

    def _begin(self) -> None:
        rounds = self._rounds
        if self._is_finished:  # the last step failed after its gradients were mixed
            self._is_finished = False
            # No weights were sent yet: the partner must not wait for them.
            rounds.channel.void(rounds.next_round, rounds.partners.send_to)
            rounds.next_round += 1
        self._transfers = {t.flow: t for t in rounds.begin(self._flows)}

    def _launch(self, number: int) -> None:
        flow, place = self._buckets[number]
        for entry in flow.buckets[place].entries:
            grad = entry.parameter.grad
            if grad is not None:
                self._sent[entry.parameter] = (grad, grad._version)
        if flow in self._transfers:
            self._transfers[flow].post(place)

    def _check_unchanged(self) -> None:
        for parameter, (sent, version) in self._sent.items():
            grad = parameter.grad
            if grad is None:  # the batch was dropped: no partner's gradient is mixed in
                continue
            if grad is not sent or grad._version != version:
                raise GossipError(
                    f"the gradient of {self._names[parameter]!r} was written after it was sent. "
                    "Call session.synchronize() after backward, then clip: it mixes the gradients "
                    "with the partner's first. To drop this batch, call "
                    "zero_grad(set_to_none=True) and step(); the partner mixes what was sent"
                )

    def _refuse_second(self, place: int) -> None:
        raise GossipError(
            f"the gradient of {self._names[self._parameters[place]]!r} was already sent in this "
            "round: backward ran twice before optimizer.step(). To accumulate, put all but the "
            "last backward inside `with session.no_sync():`; a step cannot be left out once its "
            "gradients travel: to drop a batch, call zero_grad(set_to_none=True) and step(); the "
            "partner mixes what was sent"
        )
