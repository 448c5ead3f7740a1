"""Hooks on the user's optimizers and scaler; they come off again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossipgrad._unknown_scaler import warn_of_unknown_scaler
from gossipgrad.errors import GossipError

__all__ = ["StepHooks"]


class StepHooks:
    """Calls `before` ahead of every optimizer's step and `after` once the last one has stepped.

    `torch.amp.GradScaler` does not call `optimizer.step` when it finds an overflow, and so no
    step hook fires. With `scaler` given, its `step` is wrapped: a skipped step calls `after`
    like any other, so that the partner is met. A scaler that is used without being given is
    noticed at the first step through it, and warned about.

    Args:
        optimizers: In the order in which they step; the last one ends the step.
        scaler: The scaler the user steps with, if any.
        before: Called with no arguments before each step.
        after: Called with no arguments after the last optimizer's step.

    Attributes:
        closures: Whether a step may compute its gradients itself.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._last = optimizers[-1]
        self._before = before
        self._after = after
        self.closures = True
        self._scaler = scaler
        self._stepped = False
        self._checked = scaler is not None
        self._handles = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._on_pre))
            self._handles.append(optimizer.register_step_post_hook(self._on_post))
        if scaler is not None:
            self._plain_step = scaler.step
            scaler.step = self._scaled_step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Takes all hooks off and gives the scaler its own `step` back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._scaler is not None and self._scaler.__dict__.get("step") == self._scaled_step:
            del self._scaler.__dict__["step"]

    def _on_pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._checked:
            self._checked = True
            warn_of_unknown_scaler(
                "gossip", "a step that the scaler skips will leave this rank's partner waiting"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and not self.closures:
            raise GossipError(
                "optimizer.step(closure) computes gradients after they should have met the "
                "partner's: with gradients in the payload call backward() and then step(), or "
                'send payload="weights"'
            )
        self._before()

    def _on_post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped = True
        if optimizer is self._last:
            self._after()

    def _scaled_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._stepped = False
        result = self._plain_step(optimizer, *args, **kwargs)
        if not self._stepped and optimizer is self._last:
            self._before()
            self._after()
        return result
