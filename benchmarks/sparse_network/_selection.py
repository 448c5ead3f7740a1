"""What selection costs at full size: measured alone, and slept in its place among many ranks."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.network._replay import Device
from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.planning import PiecewiseCost

OURS, TORCH, GAMMA = "gg.top_k", "torch.topk", "P102 GPU"
SELECTIONS = (OURS, TORCH, GAMMA)
# OMGS-SGD's own model, seconds = gamma n log2 n, of torch.topk on the P102-100 of its paper.
_GAMMA_SECONDS = 2.18896957e-10
_FIRST_ELEMENTS = 256
_GROWTH = 4
_REPEATS = 5
_MOST_SECONDS = 4.0  # for the repeats of one size

Curve = dict[str, list[float]]


def measure(most_elements: int, density: float, seed: int) -> dict[str, Curve]:
    """Processor seconds by elements of each kind of selection, on one thread of this machine.

    What is timed is choosing the largest of normal values, taking them out and packing the message;
    with `torch.topk` of magnitudes as the published code calls it.

    Args:
        most_elements: The largest size; they grow by four.
        density: The share that is chosen, one at least.
        seed: Of the values.
    """
    sizes = [_FIRST_ELEMENTS]
    while sizes[-1] < most_elements:
        sizes.append(min(most_elements, _GROWTH * sizes[-1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = torch.randn(most_elements, generator=torch.Generator().manual_seed(seed))
        curves = {
            name: [_seconds(choose, values[:size], density) for size in sizes]
            for name, choose in ((OURS, top_k), (TORCH, _published))
        }
    finally:
        torch.set_num_threads(threads)
    curves[GAMMA] = [_GAMMA_SECONDS * size * math.log2(size) for size in sizes]
    return {name: {"elements": list(sizes), "seconds": took} for name, took in curves.items()}


def cost_of(curve: Curve) -> PiecewiseCost:
    """The seconds of any size."""
    return PiecewiseCost.fit(curve["elements"], curve["seconds"])


class ReplayedSelection:
    """In the place of `top_k`: sleeps what it would take at full size, and chooses any places.

    Args:
        device: The emulated GPU, of whose stream selection is a part.
        cost: Seconds by elements at full size.
        time_factor: By how much the times of the profile are longer.
        size_factor: By how much its sizes are smaller.
    """

    def __init__(
        self, device: Device, cost: PiecewiseCost, *, time_factor: float, size_factor: float
    ) -> None:
        self._device = device
        self._cost = cost
        self._time_factor = time_factor
        self._size_factor = size_factor
        self._places: dict[tuple[int, int], Tensor] = {}

    def __call__(self, values: Tensor, count: int) -> Tensor:
        """As `top_k`."""
        elements = len(values)
        key = elements, count
        if key not in self._places:
            self._places[key] = torch.arange(count) * (elements // count)
        self._device.run(self.seconds(elements))
        self._device.end()  # a message cannot leave before it is chosen
        return self._places[key]

    def seconds(self, elements: int) -> float:
        """What it sleeps for so many elements at the scaled size."""
        return self._time_factor * float(self._cost(elements / self._size_factor))


def _published(values: Tensor, count: int) -> Tensor:
    return torch.topk(values.abs(), count).indices.sort().values


def _seconds(choose: Callable[[Tensor, int], Tensor], values: Tensor, density: float) -> float:
    count = max(1, int(density * len(values)))
    form = SparseFormat(len(values), count, values.dtype)
    message = torch.zeros(form.size_bytes, dtype=torch.uint8)

    def once() -> float:
        start = time.process_time()  # of one thread: what others take of the machine is not in it
        places = choose(values, count)
        form.pack(places, values[places], message)
        return time.process_time() - start

    first = once()  # takes memory
    repeats = min(_REPEATS, max(1, int(_MOST_SECONDS / max(first, 1e-6))))
    return statistics.median(once() for _ in range(repeats))


def as_json(curves: dict[str, Curve]) -> dict[str, Any]:
    """Rounded, for a file."""
    return {name: {k: _rounded(v) for k, v in curve.items()} for name, curve in curves.items()}


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.4g}") for number in numbers]
