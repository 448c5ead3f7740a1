"""Recording what a step of the user's own model costs on their own device."""

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossipgrad.planning import Profile

__all__ = ["record_profile"]


def record_profile(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Sequence[Tensor],
    loss: Callable[..., Tensor],
    *,
    name: str | None = None,
    steps: int = 20,
    warm_up_steps: int = 5,
) -> Profile:
    """Times forward, each parameter's gradient and the update, over some steps on this device.

    The steps are real: `model` is trained by them, on the same batch each time, so record a model
    that may be spoilt. Nothing is communicated. Hooks come off at the end, also after an error.
    On a GPU the times are those of CUDA events: what the GPU takes, gaps included in which it waits
    for Python. Each figure is the median over the steps; gradients stand in the order in which they
    come.

    What follows the last gradient counts as the optimizer's. Elements are counted in units of the
    narrowest parameter's, so that bytes are right where types are mixed.

    Args:
        model: Where it shall run, in training mode.
        optimizer: Trains it.
        batch: What a step takes, on the model's device; samples are counted by the first tensor's
            dim 0.
        loss: Called as `loss(model, *batch)`; returns a scalar.
        name: Of the profile; by default the model's class.
        steps: Steps that are recorded.
        warm_up_steps: Steps before them, in which kernels are chosen and memory is found.

    Returns:
        The profile, with source `"recorded"` and how.

    Raises:
        ValueError: There is nothing to record: no steps, no batch, no parameter with a gradient; or
            a parameter that the optimizer trains gets a gradient in some steps only, or several in
            one; or the loss is not one number, or the optimizer needs a closure.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> profile = record_profile(
        ...     model, optimizer, [torch.ones(16, 4)], lambda m, x: m(x).square().mean(), steps=3
        ... )
        >>> sorted(profile.names), profile.batch_size, profile.size_bytes
        (['0.bias', '0.weight', '2.bias', '2.weight'], 16, 232)
    """
    if steps < 1 or warm_up_steps < 0:
        raise ValueError(
            f"steps={steps} and warm_up_steps={warm_up_steps}: record at least one step, "
            "after 0 or more that are not"
        )
    if not batch or batch[0].dim() == 0:
        raise ValueError("batch is empty: give the tensors of one step, samples in dim 0")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in owned}
    if not parameters:
        raise ValueError(
            "the optimizer trains no parameter of this model: give the optimizer made of "
            "model.parameters()"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss itself, as often as it likes: give an "
            "optimizer whose step() needs no closure"
        )
    device = next(iter(parameters.values())).device
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    with _Hooks(parameters, clock) as ready:
        timed = []
        for number in range(warm_up_steps + steps):
            ready.clear()
            times = _step(model, optimizer, batch, loss, clock)
            if number >= warm_up_steps:
                timed.append((times, dict(ready)))
        clock.synchronize()
    return _profile(
        name or type(model).__name__,
        device,
        batch[0].shape[0],
        parameters,
        timed,
        clock,
        optimizer,
    )


class _HostClock:
    """Moments of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Everything has happened already."""

    def between(self, start: Any, end: Any) -> float:
        return end - start


class _CudaClock:
    """Moments of the GPU's stream, read once it has come there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        return max(0.0, start.elapsed_time(end) / 1e3)


_Clock = _HostClock | _CudaClock


class _Hooks:
    """While it lasts, notes when each parameter's gradient is ready."""

    def __init__(self, parameters: dict[str, nn.Parameter], clock: _Clock) -> None:
        self._parameters = parameters
        self._clock = clock
        self._ready: dict[str, Any] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> dict[str, Any]:
        for name, parameter in self._parameters.items():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._note(name))
            )
        return self._ready

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str) -> None:
        if name in self._ready:
            raise ValueError(
                f"parameter {name!r} got its gradient twice in one step: call backward() once, or "
                "record one of the accumulated batches"
            )
        self._ready[name] = self._clock.mark()


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Sequence[Tensor],
    loss: Callable[..., Tensor],
    clock: _Clock,
) -> tuple[Any, Any, Any]:
    optimizer.zero_grad()
    start = clock.mark()
    value = loss(model, *batch)
    if value.numel() != 1:
        raise ValueError(
            f"the loss is a tensor of shape {tuple(value.shape)}: return one number, for example "
            "its mean()"
        )
    computed = clock.mark()
    value.backward()
    optimizer.step()
    return start, computed, clock.mark()


def _profile(
    name: str,
    device: torch.device,
    batch_size: int,
    parameters: dict[str, nn.Parameter],
    timed: list[tuple[tuple[Any, Any, Any], dict[str, Any]]],
    clock: _Clock,
    optimizer: Optimizer,
) -> Profile:
    with_gradient = set().union(*(ready for _, ready in timed))
    if not with_gradient:
        raise ValueError("no parameter got a gradient: does the loss depend on the model?")
    for _, ready in timed:
        if missing := sorted(with_gradient - ready.keys()):
            raise ValueError(
                f"parameter {missing[0]!r} got a gradient in some steps only: record a batch that "
                "takes the same way through the model each time"
            )
    after = {
        known: statistics.median(
            clock.between(computed, ready[known]) for (_, computed, _), ready in timed
        )
        for known in with_gradient
    }
    # Gradients that come at one moment stay in the order of the last step.
    order = sorted(timed[-1][1], key=lambda known: after[known])
    forward = statistics.median(clock.between(start, computed) for (start, computed, _), _ in timed)
    step = statistics.median(clock.between(start, end) for (start, _, end), _ in timed)
    unit = min(parameters[known].itemsize for known in order)
    moments = [0.0, *(after[known] for known in order)]
    return Profile(
        name=name,
        device=_device_name(device),
        source=f"recorded: medians over {len(timed)} steps with torch {torch.__version__}",
        batch_size=batch_size,
        forward_seconds=forward,
        optimizer_seconds=max(0.0, step - forward - moments[-1]),
        names=tuple(order),
        elements=tuple(
            parameters[known].numel() * parameters[known].itemsize // unit for known in order
        ),
        backward_seconds=tuple(later - earlier for earlier, later in pairwise(moments)),
        element_bytes=unit,
        state_copies=_state_copies(optimizer, [parameters[known] for known in order]),
    )


def _state_copies(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    """Tensors of state for each of them, by their elements."""
    held = sum(
        value.numel()
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )
    return round(held / sum(p.numel() for p in parameters))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}"
