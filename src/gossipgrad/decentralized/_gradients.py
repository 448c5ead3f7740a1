"""Gradients layer by layer: each bucket leaves as backward finishes it."""

import time
from collections.abc import Sequence

from torch import Tensor

from gossipgrad.comm import Outcome
from gossipgrad.decentralized._rounds import Rounds
from gossipgrad.decentralized._section import Section, Transfer
from gossipgrad.errors import GossipError

__all__ = ["GradientExchange"]


class GradientExchange:
    """Sends each bucket of gradients when its last one is there, and mixes before the step.

    `g += weight * (received - sent)` for every gradient that exists here; one that does not is
    sent as zeros. Hooks stand on the parameters until `remove`.

    Args:
        sections: Buckets over the gradients.
        rounds: Tells the partner; shared with the weights of the same round.
        deadline_seconds: How long the step waits for the partner's gradients.
    """

    def __init__(
        self, sections: Sequence[Section], rounds: Rounds, deadline_seconds: float
    ) -> None:
        self.enabled = True
        self._rounds = rounds
        self._deadline_seconds = deadline_seconds
        self._sections = sections
        self._transfers: list[Transfer | None] = []
        self._waiting: dict[tuple[int, int], set[int]] = {}
        self._handles = []
        for number, section in enumerate(sections):
            for bucket, layout in enumerate(section.plan.buckets):
                for index in layout.indices:
                    parameter = section.entries[index].parameter
                    hook = self._hook(number, bucket, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def finish(self) -> None:
        """Sends what is missing, waits for the partner, and mixes into `.grad`; before the step."""
        self._begin()
        transfers, self._transfers = self._transfers, []
        rounds = self._rounds
        deadline = time.perf_counter() + self._deadline_seconds
        for transfer in transfers:
            if transfer is None:
                continue
            transfer.post_all()
            for bucket in sorted(transfer.exchanges):
                if rounds.take(transfer, bucket, deadline) is Outcome.LATE:
                    rounds.outcomes[Outcome.LATE] += 1
                rounds.mix(transfer, bucket, transfer.delta(bucket, keep=False))
            # A gradient that comes after its step is worth nothing: late ones are given up.
            transfer.cancel()

    def remove(self) -> None:
        """Takes the hooks off and gives up what is under way."""
        for handle in self._handles:
            handle.remove()
        for transfer in self._transfers:
            if transfer is not None:
                transfer.cancel()
        self._transfers = []

    def _begin(self) -> None:
        if self._transfers:
            return
        peers = self._rounds.partners
        alone = peers.send_to is None and peers.recv_from is None
        for number, section in enumerate(self._sections):
            transfer = None
            if not alone:
                transfer = section.begin(
                    self._rounds.channel, self._rounds.next_round, peers, self._deadline_seconds
                )
            self._transfers.append(transfer)
            for bucket, layout in enumerate(section.plan.buckets):
                self._waiting[number, bucket] = set(layout.indices)

    def _hook(self, number: int, bucket: int, index: int):
        def on_gradient(parameter: Tensor) -> None:
            if not self.enabled:
                return
            self._begin()
            waiting = self._waiting[number, bucket]
            if index not in waiting:
                name = self._sections[number].entries[index].spec.name
                raise GossipError(
                    f"the gradient of {name!r} was already sent in this round: backward ran twice "
                    "before optimizer.step(). Put all but the last backward inside "
                    "`with session.no_sync():`"
                )
            waiting.remove(index)
            transfer = self._transfers[number]
            if not waiting and transfer is not None:
                transfer.post(bucket)

        return on_gradient
