"""Checks around each optimizer step: average gradients first if they are not averaged yet."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import parameters_of
from gossipgrad.errors import GossipError, ReplicaChangedError
from gossipgrad.sparsification._aggregation import Aggregation, scale_of

__all__ = ["Closure", "StepWatch"]

Closure = Callable[..., Any]
_LOOK_EVERY = 100  # rounds between checks for gradients of untrained parameters


class StepWatch:
    """Ensures that no optimizer steps with a gradient of this rank only."""

    # A step with gradients that are not averaged (the last pass was inside `no_sync()`, or they
    # were written by hand) runs its own round, and so does a step without gradients: other ranks
    # may be in theirs. In a closure the backward pass is the round, or one follows when it returns.
    # Rounds have the number of this rank's steps, and in a closure a checksum of its weights: where
    # ranks differ in them, the round fails on all.

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        aggregation: Aggregation,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = model
        self._aggregation = aggregation
        self._scaler = scaler
        self._optimizers = list(optimizers)
        self._stepped_at: dict[int, int] = {}  # by optimizer, the round of its last step
        self._warned = False
        self._looked_at = -1
        self.start_over()

    def start_over(self) -> None:
        """Forget earlier rounds, after a state was loaded."""
        self._aggregation.steps = 0
        self._stepped_at = {
            id(each): self._aggregation.counters.rounds for each in self._optimizers
        }

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Called before each step; returns the closure to use."""
        pending = self._is_pending(optimizer)
        self._aggregation.check_steps()
        self._check_known(optimizer)
        self._look_for_untrained()
        if closure is not None:
            return self._averaging(closure, optimizer)
        if pending:
            self._run_round()
        return None

    def _averaging(self, closure: Closure, optimizer: Optimizer) -> Closure:
        """Wrap the closure to run the missing round after each call."""

        def with_round(*args: Any, **kwargs: Any) -> Any:
            self._aggregation.is_in_closure = True
            try:
                loss = closure(*args, **kwargs)
                self._check_known(optimizer)
                if self._is_pending(optimizer):
                    self._run_round()
            finally:
                self._aggregation.is_in_closure = False
            return loss

        return with_round

    def _is_pending(self, optimizer: Optimizer) -> bool:
        """Whether it would step with gradients that no round has averaged."""
        aggregation = self._aggregation
        return (
            self._stepped_at[id(optimizer)] == aggregation.counters.rounds
            or any(aggregation.passes.fresh)
            or scale_of(self._scaler) != aggregation.counters.scale
        )

    def _run_round(self) -> None:
        scaled = self._scaler is not None and self._scaler.is_enabled()
        if scaled and self._aggregation.has_gradients():
            raise GossipError(
                "the gradients of this step are not averaged over ranks, and GradScaler.step() has "
                "divided them by the scale already, and looked for what is not finite on this rank "
                "alone: make the last backward pass of every step outside no_sync(), and write "
                "none by hand"
            )
        self._aggregation.run_now()

    def _check_known(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer would train unaveraged or now frozen parameters."""
        for parameter in parameters_of(optimizer):
            if not parameter.numel():
                continue  # there is nothing to average
            known = self._aggregation.knows(parameter)
            if known and not parameter.requires_grad:
                raise ReplicaChangedError(
                    f"{self._name_of(parameter)} is frozen, and was trained when the session "
                    "began: its residual is still sent. Call session.broadcast_() on "
                    "every rank, before the backward pass, to continue without it"
                )
            grad = parameter.grad  # zero_grad(set_to_none=False) leaves zeros
            if not known and grad is not None and (parameter.requires_grad or bool(grad.any())):
                raise ReplicaChangedError(
                    f"{self._name_of(parameter)} has a gradient that no other rank gets: it was "
                    "not trained when the session began (it was frozen, or added since). Call "
                    "session.broadcast_() on every rank, before the backward pass, to train it "
                    "along, or leave its .grad None"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        named = self._model.named_parameters()
        return next((repr(name) for name, p in named if p is parameter), "a parameter")

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step."""
        aggregation = self._aggregation
        self._stepped_at[id(optimizer)] = aggregation.counters.rounds
        aggregation.steps += 1

    def _look_for_untrained(self) -> None:
        """Warn once of a parameter that has a gradient and that no optimizer here trains."""
        # Its gradient would stay this rank's own, and what is computed from all gradients, such as
        # their norm, would differ between ranks.
        look = self._aggregation.counters.rounds // _LOOK_EVERY
        if self._warned or look == self._looked_at:
            return
        self._looked_at = look
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None or self._aggregation.knows(parameter):
                continue
            # A parameter with hooks belongs to another session.
            hooked = bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
            if parameter.requires_grad and parameter.numel() and not hooked:
                self._warned = True
                warn(
                    f"{name!r} has a gradient, and no optimizer of this session trains it: the "
                    "gradient stays this rank's own. What is computed from all of them, such as "
                    "clip_grad_norm_(model.parameters()), is then another on every rank, and "
                    "weights drift apart. Freeze it with requires_grad_(False), or clip what the "
                    "optimizers train, or give it to one of them and call session.broadcast_()"
                )
                return
