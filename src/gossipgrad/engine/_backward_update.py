"""Updates during the backward pass: step and send each bucket when its gradients are ready."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.engine._flow import Flow
from gossipgrad.engine._gradient_hooks import GradientHooks
from gossipgrad.engine._replica import Replica
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._transfer import Transfer
from gossipgrad.errors import GossipError

__all__ = ["BackwardUpdate"]


class BackwardUpdate:
    """Steps the optimizers on one bucket of weights after the other while backward still runs.

    When all gradients of a bucket are ready, it is updated, its gradients are freed, and it is sent
    to the partner, so that the rest of backward hides its exchange. Parameters without a gradient,
    and buckets that lack one, are left to `optimizer.step()`, which sends the rest.

    Args:
        replica: The model and its optimizers.
        flows: The flows of phase `AFTER_UPDATE`.
        rounds: The session's rounds.
        prepare: Called once before the first update of a pass; returns whether the round may be
            opened. If not, it is opened at the end of the step.

    Attributes:
        is_stepping: Whether the running optimizer step is one of a bucket, for its hooks.
    """

    def __init__(
        self,
        replica: Replica,
        flows: Sequence[Flow],
        rounds: Rounds,
        *,
        prepare: Callable[[], bool],
    ) -> None:
        self.is_stepping = self._sends = False
        self._replica, self._flows, self._rounds, self._prepare = replica, flows, rounds, prepare
        self._transfers: dict[Flow, Transfer] = {}
        self._updated: set[nn.Parameter] = set()
        self._waiting: list[tuple[Flow, int, set[nn.Parameter]]] = []
        buckets = [bucket for flow in flows if flow.in_consensus for bucket in flow.buckets]
        self._groups = [[entry.parameter for entry in bucket.entries] for bucket in buckets]
        # A large parameter spans several buckets: the first complete one updates it whole.
        parameters = list(dict.fromkeys(p for group in self._groups for p in group))
        number_of = {parameter: number for number, parameter in enumerate(parameters)}
        self._hooks = GradientHooks(
            parameters,
            begin=self._begin,
            launch=self._update,
            on_second=_refuse_second,
            ordered=False,
        )
        self._hooks.regroup([sorted({number_of[p] for p in group}) for group in self._groups])

    @property
    def has_begun(self) -> bool:
        """Whether a backward pass has opened the round, and its step has not ended."""
        return self._hooks.began

    def enable(self, enabled: bool) -> None:
        """Set whether later backward passes update."""
        self._hooks.enabled = enabled

    def end_step(self) -> bool:
        """Send the unsent buckets of an open round, after the optimizers stepped on the rest.

        Return False if no round is open.
        """
        transfers, self._transfers = list(self._transfers.values()), {}
        has_opened = self.has_begun and self._sends
        self._hooks.finish()
        if has_opened:
            self._rounds.send(transfers)
        return has_opened

    def remove(self) -> None:
        """Remove the hooks and cancel exchanges in flight."""
        began = self._hooks.began
        self._hooks.remove()
        self._hooks.finish()
        if began and not any(transfer.exchanges for transfer in self._transfers.values()):
            self._rounds.void(self._rounds.next_round, self._rounds.partners)
        for transfer in self._transfers.values():
            transfer.cancel()
        self._transfers = {}

    def _begin(self) -> None:
        self._sends, rounds = self._prepare(), self._rounds
        due = [flow for flow in self._flows if flow.is_due(rounds.next_round)]
        begun = rounds.begin(due, frees_late=True) if self._sends else []
        self._transfers = {transfer.flow: transfer for transfer in begun}
        self._updated = set()
        self._waiting = [
            (flow, place, {entry.parameter for entry in bucket.entries})
            for flow in self._transfers
            for place, bucket in enumerate(flow.buckets)
        ]

    def _update(self, number: int) -> None:
        parameters = self._groups[number]
        self.is_stepping = True
        try:
            for optimizer in self._replica.optimizers:
                _step(optimizer, set(parameters))
        finally:
            self.is_stepping = False
        for parameter in parameters:
            parameter.grad = None
        self._updated.update(parameters)
        waiting, self._waiting = self._waiting, []
        for flow, place, needed in waiting:  # optimizer state may be split into other buckets
            if needed <= self._updated:
                self._transfers[flow].post(place)
            else:
                self._waiting.append((flow, place, needed))


def _step(optimizer: Optimizer, parameters: Collection[Tensor]) -> None:
    """Step on some of the parameters.

    Raises:
        GossipError: The optimizer counts steps per group.
    """
    groups = list(optimizer.param_groups)
    before = [group["params"] for group in groups]
    chosen = [[p for p in params if p in parameters] for params in before]
    if not any(chosen):
        return
    options = [_options(group) for group in groups]
    try:
        for group, params in zip(groups, chosen, strict=True):
            group["params"] = params
        optimizer.step()
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params
    for group, option in zip(groups, options, strict=True):
        if (now := _options(group)) != option:
            names = ", ".join(repr(n) for n in now if n not in option or now[n] != option[n])
            raise GossipError(
                f"{type(optimizer).__name__}.step() changes {names} of its param_groups, and "
                'update="in-backward" steps each bucket by itself, so that several changes would '
                "be made in a step: leave update out"
            )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _refuse_second(place: int) -> None:
    raise GossipError(
        'update="in-backward" has updated a parameter with its gradient of this step, and a second '
        "gradient arrived: backward ran twice before optimizer.step(), or raised and was repeated. "
        "To accumulate, put all but the last backward inside `with session.no_sync():`; after an "
        "error call optimizer.step(), which ends the step with the gradients that are there"
    )
