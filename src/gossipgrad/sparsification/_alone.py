"""One rank alone: it counts its steps, and pays out what more ranks had carried over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad._unknown_scaler import warn_of_unknown_scaler
from gossipgrad.comm import parameters_of
from gossipgrad.sparsification._session_state import nothing_counted
from gossipgrad.sparsification._steps import SCALER_HARM
from gossipgrad.sparsification._values import scale_of

__all__ = ["Alone"]


@dataclass(slots=True)
class _Due:
    """What is carried over of one parameter, until a step has taken it."""

    name: str
    residual: Tensor
    handle: RemovableHandle
    paid_into: Tensor | None = None


class Alone:
    """What a session of one rank has in place of rounds: nothing is withheld, and nothing meets.

    A step counts as a round, however many optimizers take it, so that a warm-up goes on where more
    ranks take over. What is loaded of more ranks is added to the first gradient of its parameter,
    as a group that is not compressed would send it, and is held until an optimizer has stepped with
    that gradient: a step that a scaler leaves out loses nothing. Velocities of momentum correction
    are given up: one rank corrects nothing.

    Args:
        optimizers: All of the session.
        scaler: Whose scale the gradients have in them.
        counts: What has been counted before, if something has.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        counts: Mapping[str, Any] | None,
    ) -> None:
        self._optimizers = list(optimizers)
        self._scaler = scaler
        self._checked = scaler is not None
        self._due: dict[int, _Due] = {}
        self._count_on(counts or {})
        self._handles = [
            *(optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers),
            *(optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers),
        ]

    def load(self, session: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes up a session's own state; `parameters` are those that are trained, by name."""
        self._forget()
        self._count_on(session["counted"])
        for name, residual in session["residuals"].items():
            handle = parameters[name].register_post_accumulate_grad_hook(self._pay)
            self._due[id(parameters[name])] = _Due(name, residual, handle)

    def state(self) -> dict[str, Any]:
        """What of a session's own state is not as at its beginning."""
        residuals = {due.name: due.residual.clone() for due in self._due.values()}
        return {"residuals": residuals, "counted": dict(self.counts)}

    def remove(self) -> None:
        """Takes the hooks off."""
        self._forget()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _count_on(self, counts: Mapping[str, Any]) -> None:
        self.counts: dict[str, Any] = {**nothing_counted(), **counts}
        # By optimizer, the rounds when it last stepped.
        self._stepped_in = {id(each): self.counts["rounds"] for each in self._optimizers}

    def _forget(self) -> None:
        for due in self._due.values():
            due.handle.remove()
        self._due = {}

    def _pay(self, parameter: Tensor) -> None:
        due, grad = self._due[id(parameter)], parameter.grad
        assert grad is not None
        # With create_graph, which has autograd on here, passes add up in new tensors.
        adds_up = due.paid_into is not None and torch.is_grad_enabled()
        if grad is not due.paid_into and not adds_up:
            factor = scale_of(self._scaler) / self.counts["scale"]
            with torch.no_grad():
                grad.add_((due.residual * factor).to(grad))
        due.paid_into = grad

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._checked:
            self._checked = True
            warn_of_unknown_scaler("sparsify", SCALER_HARM)
        if self._stepped_in[id(optimizer)] == self.counts["rounds"]:
            self.counts["rounds"] += 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Not before it: torch calls hooks twice where a step calls that of its class's parent.
        self._stepped_in[id(optimizer)] = self.counts["rounds"]
        if not self._due:
            return
        for parameter in parameters_of(optimizer):
            due = self._due.get(id(parameter))
            if due is not None and due.paid_into is not None and due.paid_into is parameter.grad:
                due.handle.remove()
                del self._due[id(parameter)]
