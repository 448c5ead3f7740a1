"""Gradients layer by layer: each bucket leaves as backward finishes it."""

import time
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from gossipgrad.comm import Outcome
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._transfer import Transfer
from gossipgrad.errors import GossipError

__all__ = ["GradientExchange"]


class GradientExchange:
    """Sends each bucket of gradients when its last one is there, and mixes before the step.

    `g += weight * (received - sent)` for every gradient that exists here; one that does not is
    sent as zeros. Hooks stand on the parameters until `remove`.

    Args:
        sections: Buckets over the gradients.
        rounds: Tells the partner; shared with the weights of the same round.
        owner: When it is collected, the hooks come off.
    """

    def __init__(self, sections: Sequence[Section], rounds: Rounds, owner: object) -> None:
        self.enabled = True
        self._rounds = rounds
        self._sections = sections
        self._begun = False
        self._transfers: dict[Section, Transfer] = {}
        self._waiting: dict[tuple[Section, int], set[int]] = {}
        self._sent: dict[tuple[Section, int], tuple[Tensor, int]] = {}
        self._finished = False
        self._handles = [
            section.entries[index].parameter.register_post_accumulate_grad_hook(
                self._hook(section, bucket, index)
            )
            for section in sections
            for bucket, layout in enumerate(section.plan.buckets)
            for index in layout.indices
        ]
        weakref.finalize(owner, self.remove).atexit = False  # pyrefly: ignore[missing-attribute]

    @property
    def begun(self) -> bool:
        """Whether gradients of this step have been sent, and are not mixed yet."""
        return self._begun

    def finish(self) -> None:
        """Sends what is missing, waits for the partner, and mixes into `.grad`; once a step.

        Raises:
            GossipError: If a gradient was written after it was sent (clipped, unscaled, ...).
        """
        if self._finished:
            return
        self._begin()
        self._check_unchanged()
        self._finished = True
        rounds = self._rounds
        try:
            for transfer in self._transfers.values():
                transfer.post_all()
                deadline = time.perf_counter() + rounds.longest_wait_seconds
                for bucket in sorted(transfer.exchanges):
                    if rounds.take(transfer, bucket, deadline) is Outcome.LATE:
                        rounds.outcomes[Outcome.LATE] += 1
                    rounds.mix(transfer, bucket, transfer.delta(bucket))
        finally:
            # A gradient that comes after its step is worth nothing: late ones are given up.
            self._give_up()

    def step_is_over(self) -> None:
        """The optimizer has used the gradients; the next backward begins a new round."""
        self._finished = False

    def remove(self) -> None:
        """Takes the hooks off and gives up what is under way."""
        for handle in self._handles:
            handle.remove()
        self._give_up()

    def _give_up(self) -> None:
        for transfer in self._transfers.values():
            transfer.cancel()
        self._begun, self._transfers, self._sent = False, {}, {}

    def _begin(self) -> None:
        if self._begun:
            return
        if self._finished:  # the last step failed after its gradients had met
            self._finished = False
            # Of weights nothing was sent yet: the partner must not wait for them.
            self._rounds.channel.void(self._rounds.next_round, self._rounds.partners.send_to)
            self._rounds.next_round += 1
        self._transfers = {t.section: t for t in self._rounds.begin(self._sections)}
        self._begun = True
        self._waiting = {
            (section, bucket): set(layout.indices)
            for section in self._sections
            for bucket, layout in enumerate(section.plan.buckets)
        }

    def _check_unchanged(self) -> None:
        for (section, index), (sent, version) in self._sent.items():
            grad = section.entries[index].parameter.grad
            if grad is None:  # the batch was dropped: nothing of the partner's is mixed into it
                continue
            if grad is not sent or grad._version != version:
                raise GossipError(
                    f"the gradient of {section.entries[index].spec.name!r} was written after it "
                    "was sent. Call session.synchronize() after backward, then clip: it mixes the "
                    "gradients with the partner's first. To drop this batch, call "
                    "zero_grad(set_to_none=True) and step(); the partner mixes what was sent"
                )

    def _hook(self, section: Section, bucket: int, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if not self.enabled:
                return
            self._begin()
            waiting = self._waiting[section, bucket]
            if index not in waiting:
                raise GossipError(
                    f"the gradient of {section.entries[index].spec.name!r} was already sent in "
                    "this round: backward ran twice before optimizer.step(). To accumulate, put "
                    "all but the last backward inside `with session.no_sync():`; a step cannot be "
                    "left out once its gradients travel: to drop a batch, call "
                    "zero_grad(set_to_none=True) and step(); the partner mixes what was sent"
                )
            waiting.remove(index)
            if parameter.grad is not None:
                self._sent[section, index] = (parameter.grad, parameter.grad._version)
            if not waiting and section in self._transfers:
                self._transfers[section].post(bucket)

        return on_gradient
