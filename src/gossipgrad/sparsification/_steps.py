"""Hooks on the user's optimizers: gradients that have not met do so before a step."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import parameters_of
from gossipgrad.engine import warn_of_unknown_scaler
from gossipgrad.errors import GossipError, ReplicaChangedError
from gossipgrad.sparsification._aggregation import Aggregation
from gossipgrad.sparsification._left_out import LeftOut
from gossipgrad.sparsification._values import scale_of

__all__ = ["SCALER_HARM", "StepWatch"]

SCALER_HARM = "residuals carry gradients over into steps in which its scale is other"


class StepWatch:
    """Sees that no optimizer steps with a gradient of this rank alone.

    Gradients meet at the end of backward. A step with gradients that have not (the last pass was
    inside `no_sync()`, or gradients were written by hand) is a round of its own, and so is one
    without any: other ranks may be in theirs. Where the step computes gradients itself, in a
    closure, the backward pass in there is the round; what has not met when the closure returns
    does so then. An optimizer that does not call its closure steps without: that ends the session.

    Gradients written by hand after a round whose step was left out are taken for those of that
    round, unless a scaler left it out and has changed its scale.

    Args:
        model: Names the parameters.
        optimizers: All of the session.
        aggregation: The rounds.
        scaler: The one that the session knows.

    Attributes:
        keeps: The session, which lives as long as hooks of it are on an optimizer that lives.
    """

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
        self._checked = scaler is not None
        self.keeps: object = None
        self._optimizers = list(optimizers)
        self._met_in: dict[int, int] = {}  # by optimizer, the rounds when it last stepped
        self._waiting: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._left_to_closure: set[int] = set()  # optimizers whose gradients are to meet in there
        self._warned = False
        self._left_out = LeftOut(model, aggregation.knows)
        self.start_over()
        self._handles = [
            *(optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers),
            *(optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers),
        ]

    def start_over(self) -> None:
        """No round until now is one of the step to come: after a state was loaded."""
        self._met_in = {id(each): self._aggregation.rounds for each in self._optimizers}
        self._waiting = {}

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.keeps = [], None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if not self._checked:
            self._checked = True
            warn_of_unknown_scaler("sparsify", SCALER_HARM)
        unmet = self._unmet(optimizer)
        self._aggregation.check_steps(met=not unmet)
        self._check_known(optimizer, self._aggregation)
        self._look_for_thrown_away()
        self._left_out.look(self._aggregation.rounds, stacklevel=3)
        self._left_to_closure.discard(id(optimizer))
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if unmet:
                self._meet()
            return None
        if unmet:
            self._left_to_closure.add(id(optimizer))
        closure = self._meeting(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _meeting(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """The closure, and after each call of it the round that it has not had."""

        def and_meet(*args: Any, **kwargs: Any) -> Any:
            told = closure(*args, **kwargs)
            self._check_known(optimizer, self._aggregation)
            if self._unmet(optimizer):
                self._meet()
            self._left_to_closure.discard(id(optimizer))
            return told

        return and_meet

    def _unmet(self, optimizer: Optimizer) -> bool:
        """Whether it would step with what no round of its step has given."""
        aggregation = self._aggregation
        return (
            self._met_in[id(optimizer)] == aggregation.rounds
            or any(aggregation.passes.fresh)
            or scale_of(self._scaler) != aggregation.scale
        )

    def _meet(self) -> None:
        nothing = self._aggregation.nothing()
        if nothing is None and self._scaler is not None and self._scaler.is_enabled():
            raise GossipError(
                "the gradients of this step have not met, and GradScaler.step() has divided them "
                "by the scale already, and looked for what is not finite on this rank alone: make "
                "the last backward pass of every step outside no_sync(), and write none by hand"
            )
        self._aggregation.run_now(nothing)

    def _check_known(self, optimizer: Optimizer, aggregation: Aggregation) -> None:
        """Raises where the optimizer would train what has never met, or what is frozen by now."""
        for parameter in parameters_of(optimizer):
            if not parameter.numel():
                continue  # there is nothing to meet
            known = aggregation.knows(parameter)
            if known and not parameter.requires_grad:
                raise ReplicaChangedError(
                    f"{self._name_of(parameter)} is frozen, and was trained when the session "
                    "began: what is carried over of it still meets. Call session.broadcast_() on "
                    "every rank, before the backward pass, to go on without it"
                )
            if not known and _has_gradient(parameter):
                raise ReplicaChangedError(
                    f"{self._name_of(parameter)} has a gradient that no other rank gets: it was "
                    "not trained when the session began (it was frozen, or added since). Call "
                    "session.broadcast_() on every rank, before the backward pass, to train it "
                    "along, or leave its .grad None"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        named = self._model.named_parameters()
        return next((repr(name) for name, p in named if p is parameter), "a parameter")

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Not before it: torch calls hooks twice where a step calls that of its class's parent.
        aggregation = self._aggregation
        if id(optimizer) in self._left_to_closure:
            why = (
                f"the session is over: {type(optimizer).__name__}.step() did not call the closure "
                "that it was given, and stepped with gradients that have not met, so weights are "
                "no longer equal on all ranks. Step without a closure, and start from a state that "
                "was saved before"
            )
            aggregation.end(why)
            raise GossipError(why)
        self._met_in[id(optimizer)] = aggregation.rounds
        self._waiting.pop(id(optimizer), None)
        # Where nothing is carried over, nothing is lost by it.
        if aggregation.finite and aggregation.carries and not self._warned:
            self._note_waiting(aggregation.rounds)

    def _note_waiting(self, rounds: int) -> None:
        """Keeps one gradient, the smallest, of each optimizer that has yet to step with it."""
        for other in self._optimizers:
            if self._met_in[id(other)] != rounds and id(other) not in self._waiting:
                met = [
                    (p, p.grad)
                    for p in parameters_of(other)
                    if p.requires_grad and p.grad is not None and not p.grad.requires_grad
                ]
                if met:
                    self._waiting[id(other)] = min(met, key=lambda pair: pair[0].numel())

    def _look_for_thrown_away(self) -> None:
        """Warns once if gradients were emptied that had met, while another optimizer stepped.

        It is no error: who leaves out a step of one optimizer on purpose loses little by it.
        """
        if not self._warned and any(_emptied(of, grad) for of, grad in self._waiting.values()):
            self._warned = True
            self._waiting = {}
            warnings.warn(
                "gradients that had met were thrown away before their optimizer stepped, while "
                "another did: every backward pass is a round of all parameters of a session, and "
                "what is carried over now has parts of losses in it that are none of theirs. "
                "Give each optimizer that steps on its own a session, and run the passes of the "
                "others inside its no_sync()",
                stacklevel=4,
            )


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Not, if it is frozen and all is zero, as `zero_grad(set_to_none=False)` leaves it."""
    grad = parameter.grad
    return grad is not None and (parameter.requires_grad or bool(grad.any()))


def _emptied(parameter: nn.Parameter, grad: Tensor) -> bool:
    """Whether `.grad` is another now; passes with `create_graph` add to it in a new tensor."""
    now = parameter.grad
    return now is not grad and not (now is not None and now.requires_grad)
