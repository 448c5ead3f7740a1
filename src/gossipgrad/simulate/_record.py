"""Recording the cost of a step of the user's own model on their own device."""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import Clock
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
    clock = Clock(device)
    ready: dict[str, Any] = {}

    def note(name: str) -> None:
        if name in ready:
            raise ValueError(
                f"parameter {name!r} got its gradient twice in one step: call backward() once, or "
                "record one of the accumulated batches"
            )
        ready[name] = clock.now()

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in parameters.items()
    ]
    try:
        marked = []
        for number in range(warm_up_steps + steps):
            ready.clear()
            start, computed, end = _step(model, optimizer, batch, loss, clock)
            if number >= warm_up_steps:
                marked.append((tuple(ready), [start, computed, *ready.values(), end]))
    finally:
        for handle in handles:
            handle.remove()
    recorded = []
    for named, moments in marked:
        _, forward, *later, whole = clock.seconds(moments)
        after = [max(0.0, seconds - forward) for seconds in later]
        recorded.append(_Step(forward, whole, dict(zip(named, after, strict=True))))
    forward, step, after = _medians(recorded)
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


class _Step(NamedTuple):
    """Seconds of forward, of a step, and from forward until each gradient is ready."""

    forward: float
    whole: float
    after: dict[str, float]


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
    clock: Clock,
) -> tuple[Any, Any, Any]:
    optimizer.zero_grad()
    start = clock.now()
    value = loss(model, *batch)
    if value.numel() != 1:
        raise ValueError(
            f"the loss is a tensor of shape {tuple(value.shape)}: return one number, for example "
            "its mean()"
        )
    computed = clock.now()
    value.backward()
    optimizer.step()
    return start, computed, clock.now()


def _medians(steps: list[_Step]) -> _Step:
    """The same of all steps, gradients in order."""
    names = set().union(*(step.after for step in steps))
    if not names:
        raise ValueError("no parameter got a gradient: does the loss depend on the model?")
    for step in steps:
        if missing := sorted(names - step.after.keys()):
            raise ValueError(
                f"parameter {missing[0]!r} got a gradient in some steps only: record a batch that "
                "takes the same path through the model each time"
            )
    after = {name: median(step.after[name] for step in steps) for name in steps[-1].after}
    # Gradients that are ready at one moment stay in the order of the last step.
    ordered = dict(sorted(after.items(), key=lambda item: item[1]))
    return _Step(median(s.forward for s in steps), median(s.whole for s in steps), ordered)


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
