"""Recording the cost of a step of the user's own model on their own device."""

import inspect
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.planning import Profile

__all__ = ["record_profile"]


def record_profile(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Sequence[Tensor],
    loss: Callable[..., Tensor],
    *,
    steps: int = 20,
    warm_up_steps: int = 5,
) -> Profile:
    """Times forward, each parameter's gradient and the update, over some steps on this device.

    The steps are real: they train `model`, on the same batch each time, so record a copy. Nothing
    is communicated. Hooks are removed at the end, also after an error. On a GPU the times are those
    of CUDA events, with the gaps in which it waits for Python. Each figure is the median over the
    steps; gradients are listed in the order in which they are ready.

    The time after the last gradient counts as the optimizer's. Elements are counted in units of the
    narrowest parameter's, so that bytes are right where types are mixed.

    Args:
        model: On its device, in training mode.
        optimizer: Of its parameters.
        batch: The tensors of a step, on the model's device; the samples are in dim 0 of the first.
        loss: Called as `loss(model, *batch)`; returns a scalar.
        steps: Steps that are recorded.
        warm_up_steps: Steps before them, in which kernels are chosen and memory is allocated.

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
    _check(optimizer, batch, steps, warm_up_steps)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in owned}
    if not parameters:
        raise ValueError(
            "the optimizer trains no parameter of this model: give the optimizer made of "
            "model.parameters()"
        )
    device = next(iter(parameters.values())).device
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    ready: dict[str, Any] = {}

    def note(name: str) -> None:
        if name in ready:
            raise ValueError(
                f"parameter {name!r} got its gradient twice in one step: call backward() once, or "
                "record one of the accumulated batches"
            )
        ready[name] = clock.mark()

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in parameters.items()
    ]
    try:
        recorded = []
        for number in range(warm_up_steps + steps):
            ready.clear()
            start, computed, end = _step(model, optimizer, batch, loss, clock)
            if number >= warm_up_steps:
                recorded.append(_Step(start, computed, end, dict(ready)))
        clock.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    forward, step, after = _medians(recorded, clock)
    names = tuple(after)
    trained = [parameters[known] for known in names]
    unit = min(parameter.itemsize for parameter in trained)
    moments = [0.0, *after.values()]
    return Profile(
        name=type(model).__name__,
        device=_device_name(device),
        source=f"recorded: medians over {steps} steps with torch {torch.__version__}",
        batch_size=batch[0].shape[0],
        forward_seconds=forward,
        optimizer_seconds=max(0.0, step - forward - moments[-1]),
        names=names,
        elements=tuple(p.numel() * p.itemsize // unit for p in trained),
        backward_seconds=tuple(later - earlier for earlier, later in pairwise(moments)),
        element_bytes=unit,
        state_copies=_state_copies(optimizer, trained),
    )


class _HostClock:
    """Moments of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def between(self, start: Any, end: Any) -> float:
        return end - start


class _CudaClock:
    """Moments of the GPU's stream, read after it has passed them."""

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


class _Step(NamedTuple):
    """Moments of a step: its start, the end of forward, its end, and when gradients are ready."""

    start: Any
    computed: Any
    end: Any
    ready: dict[str, Any]


def _check(optimizer: Optimizer, batch: Sequence[Tensor], steps: int, warm_up_steps: int) -> None:
    if steps < 1 or warm_up_steps < 0:
        raise ValueError(
            f"steps={steps} and warm_up_steps={warm_up_steps}: record at least one step, "
            "after 0 or more that are not"
        )
    if not batch or batch[0].dim() == 0:
        raise ValueError("batch is empty: give the tensors of one step, samples in dim 0")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss itself, as often as it likes: give an "
            "optimizer whose step() needs no closure"
        )


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


def _medians(steps: list[_Step], clock: _Clock) -> tuple[float, float, dict[str, float]]:
    """Seconds of forward, of a step, and from forward until each gradient is ready, in order."""
    names = set().union(*(step.ready for step in steps))
    if not names:
        raise ValueError("no parameter got a gradient: does the loss depend on the model?")
    for step in steps:
        if missing := sorted(names - step.ready.keys()):
            raise ValueError(
                f"parameter {missing[0]!r} got a gradient in some steps only: record a batch that "
                "takes the same path through the model each time"
            )
    after = {
        name: median(clock.between(step.computed, step.ready[name]) for step in steps)
        for name in steps[-1].ready
    }
    forward = median(clock.between(step.start, step.computed) for step in steps)
    whole = median(clock.between(step.start, step.end) for step in steps)
    # Gradients that are ready at one moment stay in the order of the last step.
    return forward, whole, dict(sorted(after.items(), key=lambda item: item[1]))


def _state_copies(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> int:
    """Tensors of state for each of them, by their elements."""
    elements = sum(
        value.numel()
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )
    return round(elements / sum(p.numel() for p in parameters))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}"
