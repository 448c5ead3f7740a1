"""A profile replayed: a model, an optimizer and an emulated GPU that sleeps through the compute.

Tensors have their true sizes and pass through autograd, so that every hook fires as it does in
training. What a GPU would compute is slept; what the host does in training (copies into buckets,
sending, mixing) is done.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.planning import Profile

_FLAT_BELOW = 4096  # elements; larger parameters are matrices, as most are
_PR_SET_TIMERSLACK = 29
_MOMENTS = 25  # of a step: what comes within one comes at once; each sleep costs 0.3 ms of CPU
_SHORTEST_SLEEP_SECONDS = 0.0005


def sharpen_sleep() -> None:
    """Lets sleeps of this thread end within microseconds of their time; Linux rounds by 50."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Device:
    """An emulated GPU with one stream: what it runs is slept.

    What the host does to tensors in between (copies into buckets, mixing in hooks) would be kernels
    of the same stream: it delays the work behind it. A sleep that ends too late does not: what
    follows is shorter by it.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._free_at = 0.0
        self._returned_at = 0.0
        self.reset()

    def reset(self) -> None:
        """Forgets what was counted."""
        self.planned_seconds = 0.0
        self.late_seconds = 0.0

    def begin(self) -> None:
        """The next work starts now, or when the last has ended."""
        self._returned_at = time.perf_counter()
        self._free_at = max(self._free_at, self._returned_at)

    def run(self, seconds: float) -> None:
        """Sleeps until this work is done, or nearly: short waits are left to the next one."""
        between = time.perf_counter() - self._returned_at
        seconds *= self.pace
        self._free_at += between + seconds
        self.planned_seconds += seconds
        self._sleep(_SHORTEST_SLEEP_SECONDS)

    def end(self) -> None:
        """Sleeps until all work is done, and counts by how much that is late."""
        self._free_at += time.perf_counter() - self._returned_at
        self._sleep(0.0)
        self.late_seconds += max(0.0, self._returned_at - self._free_at)

    def _sleep(self, shortest: float) -> None:
        left = self._free_at - time.perf_counter()
        if left > shortest:
            time.sleep(left)
        self._returned_at = time.perf_counter()


class _Layers(torch.autograd.Function):
    """A few parameters in the graph: their gradients are ready when the device has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: "ReplayModel", number: int, *_: Tensor) -> Tensor:
        ctx.model, ctx.number = model, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        model: ReplayModel = ctx.model
        group = model.groups[ctx.number]
        model.device.run(group.seconds)
        if ctx.number == len(model.groups) - 1:
            model.device.end()
        return grads[0], None, None, *model.gradients(group)


@dataclass(frozen=True)
class _Group:
    """Parameters whose gradients come together, and the time since those before."""

    parameters: list[nn.Parameter]
    seconds: float

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [parameter.numel() for parameter in self.parameters]


class ReplayModel(nn.Module):
    """Parameters of a profile's sizes, in modules as there; forward and backward take its times.

    Of the forward pass each has as large a share as of the backward pass, after the hooks of its
    modules. Parameters are zeros, and so are gradients. A gradient is a new tensor over memory that
    all share: autograd hands it on without a copy, as a GPU's kernel writes it where it belongs.
    Gradients that are ready within a 25th of the step come together: with a sleep for each, the
    replay itself would keep the processors busy.
    """

    def __init__(self, profile: Profile, device: Device) -> None:
        super().__init__()
        self.device = device
        self.forward_seconds = profile.forward_seconds
        backward: list[nn.Parameter] = []
        layers: dict[str, nn.Module] = {}
        for name, count in zip(profile.names, profile.elements, strict=True):
            layer, _, own = name.rpartition(".")
            backward.append(nn.Parameter(torch.zeros(shape_of(count))))
            layers.setdefault(layer, nn.Identity()).register_parameter(own, backward[-1])
        for layer in reversed(layers):  # modules in the order of the forward pass
            self.add_module(layer.replace(".", "_") or "self", layers[layer])
        self.groups = _groups(
            backward, profile.backward_seconds, profile.compute_seconds / _MOMENTS
        )
        owners = {p: module for module in layers.values() for p in module.parameters()}
        self._modules_of = [{owners[p]: None for p in group.parameters} for group in self.groups]
        whole = sum(group.seconds for group in self.groups)
        self._shares = [group.seconds / whole for group in self.groups]
        self._zeros = torch.zeros(max(sum(group.sizes) for group in self.groups))

    def gradients(self, group: "_Group") -> list[Tensor]:
        """Gradients of zeros, in one call where shapes allow it: what this takes is no training."""
        views = self._zeros[: sum(group.sizes)].split(group.sizes)
        return [
            view if p.ndim == 1 else view.view(p.shape)
            for view, p in zip(views, group.parameters, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        self.device.begin()
        for number in reversed(range(len(self.groups))):
            for module in self._modules_of[number]:  # for its hooks
                module(x)
            self.device.run(self.forward_seconds * self._shares[number])
            x = _Layers.apply(x, self, number, *self.groups[number].parameters)
        self.device.end()
        self.device.begin()
        return x


def _groups(
    parameters: list[nn.Parameter], seconds: Sequence[float], moment_seconds: float
) -> list[_Group]:
    """Parameters in the order of backward, those together that come within a moment."""
    groups: list[_Group] = []
    held: list[nn.Parameter] = []
    since = 0.0
    for parameter, own in zip(parameters, seconds, strict=True):
        if held and since + own > moment_seconds:
            groups.append(_Group(held, since))
            held, since = [], 0.0
        held.append(parameter)
        since += own
    return [*groups, _Group(held, since)]


def shape_of(count: int) -> tuple[int, ...]:
    """A vector, or the squarest matrix of at most `count` elements (less by under two rows)."""
    if count < _FLAT_BELOW:
        return (count,)
    rows = math.isqrt(count)
    return rows, count // rows


class ReplayOptimizer(Optimizer):
    """An update that takes a GPU's time and does no arithmetic."""

    def __init__(self, parameters: Iterable[Any], device: Device, seconds: float) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._device = device
        self._seconds = seconds
        self._elements = sum(p.numel() for group in self.param_groups for p in group["params"])

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Sleeps.

        A step on some of the parameters, in the middle of a backward pass, takes its share.
        """
        assert closure is None
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        elements = sum(p.numel() for p in there)
        if 0 < elements < self._elements:
            self._device.run(self._seconds * elements / self._elements)
        elif there:
            self._device.begin()
            self._device.run(self._seconds)
            self._device.end()
