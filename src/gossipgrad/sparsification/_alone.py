"""One rank alone: it counts its steps, and pays out what more ranks had carried over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad.comm import parameters_of
from gossipgrad.engine import warn_of_unknown_scaler
from gossipgrad.sparsification._session_state import nothing_counted
from gossipgrad.sparsification._steps import SCALER_HARM
from gossipgrad.sparsification._values import scale_of
from gossipgrad.sparsification._weakly import weakly

__all__ = ["Alone"]


@dataclass(slots=True)
class _Due:
    """What is carried over of one parameter, until a step has taken it.

    Attributes:
        paid: Whether the gradient that the parameter has now has it in it.
    """

    name: str
    residual: Tensor
    paid: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)


class Alone:
    """What a session of one rank has in place of rounds: nothing is withheld, and nothing meets.

    A step counts as a round, however many optimizers take it, so that a warm-up goes on where more
    ranks take over. What is loaded of more ranks is added to the first gradient of its parameter,
    as a group that is not compressed would send it, and is held until an optimizer has stepped with
    that gradient, or with what was made of it: a step that a scaler leaves out loses nothing. A
    gradient that was emptied has nothing of it any more, and the next one gets it. Velocities of
    momentum correction are given up: one rank corrects nothing.

    Args:
        optimizers: All of the session.
        scaler: Whose scale the gradients have in them.
        counts: What has been counted before, if something has.

    Attributes:
        keeps: The session, which lives as long as hooks of it are on an optimizer that lives.
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
        self.keeps: object = None
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
            parameter, due = parameters[name], _Due(name, residual)
            self._due[id(parameter)] = due
            due.handles = [
                parameter.register_hook(partial(weakly(self._look), parameter)),
                parameter.register_post_accumulate_grad_hook(weakly(self._pay)),
            ]

    def state(self) -> dict[str, Any]:
        """What of a session's own state is not as at its beginning."""
        residuals = {due.name: due.residual.clone() for due in self._due.values()}
        return {"residuals": residuals, "counted": dict(self.counts)}

    def remove(self) -> None:
        """Takes the hooks off."""
        self._forget()
        for handle in self._handles:
            handle.remove()
        self._handles, self.keeps = [], None

    def _count_on(self, counts: Mapping[str, Any]) -> None:
        self.counts: dict[str, Any] = {**nothing_counted(), **counts}
        # By optimizer, the rounds when it last stepped.
        self._stepped_in = {id(each): self.counts["rounds"] for each in self._optimizers}

    def _forget(self) -> None:
        for key in list(self._due):
            self._settle(key)

    def _settle(self, key: int) -> None:
        for handle in self._due.pop(key).handles:
            handle.remove()

    def _look(self, parameter: Tensor, _: Tensor | None = None) -> None:
        """Notes if the gradient was emptied, by None or by zeros; before a pass adds to it."""
        if parameter.grad is None or not bool(parameter.grad.any()):
            self._due[id(parameter)].paid = False

    @torch.no_grad()
    def _pay(self, parameter: Tensor) -> None:
        due, grad = self._due[id(parameter)], parameter.grad
        assert grad is not None
        if not due.paid:
            due.paid = True
            factor = scale_of(self._scaler) / self.counts["scale"]
            grad.add_((due.residual * factor).to(grad))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._checked:
            self._checked = True
            warn_of_unknown_scaler("sparsify", SCALER_HARM)
        if _left_out(optimizer):
            return
        if self._stepped_in[id(optimizer)] == self.counts["rounds"]:
            self.counts["rounds"] += 1
        if self._due:
            for parameter in parameters_of(optimizer):
                if id(parameter) in self._due:
                    self._look(parameter)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Not before it: torch calls hooks twice where a step calls that of its class's parent.
        if _left_out(optimizer):
            return
        self._stepped_in[id(optimizer)] = self.counts["rounds"]
        if self._due:
            for parameter in parameters_of(optimizer):
                due = self._due.get(id(parameter))
                if due is not None and due.paid:
                    self._settle(id(parameter))


def _left_out(optimizer: Optimizer) -> bool:
    """Whether a scaler has the step of a fused optimizer change nothing, which it calls anyway."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
