"""Hooks on the user's optimizers and scaler: one call before a step, one after it."""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from gossipgrad._messages import warn
from gossipgrad.comm import parameters_of

__all__ = ["Closure", "StepHooks", "held_by"]

Closure = Callable[..., Any]

_FRAMES = 12  # from a step hook up to the scaler's own step there are about five


class StepHooks:
    """Calls `before` before every optimizer's step and `after` after it.

    `torch.amp.GradScaler` does not call `optimizer.step` when it finds an overflow, and so no step
    hook fires. Where skipped steps count, the scaler's `step` is wrapped: a skipped step calls both
    like any other, so that the partner does not wait. The first step of a scaler that was not
    passed to the session issues a warning.

    torch fires an optimizer's hooks twice where its `step` calls that of a parent class of which a
    plain instance exists: only the outer call counts here.

    An optimizer may hold another one that makes its updates, on parameters of its own: SAM's
    `base_optimizer`. If that one steps by itself, as in SAM's `second_step()`, it is a step of the
    optimizer that was given.

    Args:
        optimizers: The session's optimizers.
        scaler: The user's scaler, if any.
        before: Called before each step with its optimizer and closure; returns the closure for the
            step to use.
        after: Called with the optimizer after each step.
        counts_skipped: Whether steps that the scaler skips count.
        call: The function that created the session, for messages.
        harm: The consequence of an unknown scaler, for the warning.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        before: Callable[[Optimizer, Closure | None], Closure | None],
        after: Callable[[Optimizer], None],
        *,
        counts_skipped: bool = True,
        call: str,
        harm: str,
    ) -> None:
        self._optimizers = list(optimizers)
        self._before, self._after = before, after
        self._call, self._harm = call, harm
        self._scaler = scaler if counts_skipped else None
        self._knows_scaler = scaler is not None
        self._has_stepped = False
        # By optimizer. A step that raised leaves its entry here; the call stack shows that it is
        # over.
        self._depth: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles = []
        # By the optimizer that is held, the one that holds it.
        self._holders = {
            held: optimizer for optimizer in optimizers for held in held_by(optimizer, optimizers)
        }
        try:
            for optimizer in (*optimizers, *self._holders):
                self._handles.append(optimizer.register_step_pre_hook(self._on_pre))
                self._handles.append(optimizer.register_step_post_hook(self._on_post))
            if self._scaler is not None:
                self._plain_step = self._scaler.step
                self._scaler.step = _ScaledStep(self._scaled_step, self._scaler)  # type: ignore[method-assign]
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all hooks and restore the scaler's `step`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._scaler is not None:
            step = self._scaler.__dict__.get("step")
            if isinstance(step, _ScaledStep) and step.call == self._scaled_step:
                del self._scaler.__dict__["step"]

    # A compiled step() would trace through the whole exchange. As in torch.optim: imports it late.
    @torch._disable_dynamo
    def _on_pre(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        holder = self._holders.get(optimizer, optimizer)
        if holder is not optimizer and self._depth.get(holder) and _calls_of_step(holder):
            return None
        if self._depth.get(optimizer) and _calls_of_step(optimizer) > 1:
            self._depth[optimizer] += 1
            return None
        self._depth[optimizer] = 1
        if not self._knows_scaler:
            self._knows_scaler = True
            _warn_of_unknown_scaler(self._call, self._harm)
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        closure = self._before(holder, given)
        if closure is given:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    @torch._disable_dynamo
    def _on_post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        holder = self._holders.get(optimizer, optimizer)
        if holder is not optimizer and not self._depth.get(optimizer):
            return  # in the holder's own step
        self._depth[optimizer] = self._depth.get(optimizer, 1) - 1
        if self._depth[optimizer]:
            return
        self._has_stepped = True
        self._after(holder)

    def _scaled_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._has_stepped = False
        result = self._plain_step(optimizer, *args, **kwargs)
        optimizer = self._holders.get(optimizer, optimizer)
        if not self._has_stepped and optimizer in self._optimizers:  # it may also step others
            self._before(optimizer, None)
            self._after(optimizer)
        return result


class _ScaledStep:
    """The `step` of a scaler in a session; a copy of the scaler has its plain one."""

    def __init__(self, call: Callable[..., Any], scaler: torch.amp.GradScaler) -> None:
        self.call, self._scaler = call, weakref.ref(scaler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        scaler = self._scaler()
        assert scaler is not None
        return partial, (type(scaler).step, scaler)


def held_by(optimizer: Optimizer, given: Sequence[Optimizer] = ()) -> list[Optimizer]:
    """Return the optimizers that one holds as attributes and that train only its parameters."""
    own = {id(p) for p in parameters_of(optimizer)}
    return [
        held
        for held in vars(optimizer).values()
        if isinstance(held, Optimizer)
        and held not in given
        and {id(p) for p in parameters_of(held)} <= own
    ]


def _calls_of_step(optimizer: Optimizer) -> int:
    """Count the active calls of torch's wrappers around this optimizer's `step`."""
    frame, calls = sys._getframe(2), 0
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            args = frame.f_locals.get("args", ())
            calls += bool(args) and args[0] is optimizer
        frame = frame.f_back
    return calls


def _warn_of_unknown_scaler(call: str, harm: str) -> None:
    """Warn if `torch.amp.GradScaler.step` is among the callers of a step hook."""
    code = torch.amp.GradScaler.step.__code__
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_code is code:
            warn(
                "optimizer.step() is called by a GradScaler that the session does not know: "
                f"{harm}. Pass {call}(..., scaler=scaler)"
            )
            return
        frame = frame.f_back
