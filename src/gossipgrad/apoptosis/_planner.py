"""Which neurons go in one event: those that save the most time per unit of error, in all layers.

Time is counted, so that all ranks plan the same: the multiplications of each layer's products at
its widths, rounded up to whole vectors, and a constant for each output that is written and read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from torch import nn

from gossipgrad.apoptosis._judge import Options
from gossipgrad.apoptosis._neurons import Neurons, output_dim, weight_of

__all__ = ["Work", "counts_of", "plan_counts", "unit_of"]

Count = int | float | np.ndarray  # of one choice, or of several
_PER_OUTPUT = 32  # BatchNorm, ReLU and their gradients take as long as about 40 multiplications
_MOST_COUNTS = 32
_NOTHING = 1e-9  # an error that is rounding
_LEAST = 0.25  # share of a step that a unit of error has to save; else the budget is not spent


def unit_of(neurons: Neurons, round_to: int) -> int:
    """Return the fewest neurons whose outputs are a multiple of `round_to`; all, if more."""
    return min(round_to // gcd(round_to, neurons.outputs), neurons.width)


def counts_of(neurons: Neurons, round_to: int, at_most: float) -> list[int]:
    """Return how many neurons may go so that their layer's outputs are a multiple of `round_to`."""
    width, unit = neurons.width, unit_of(neurons, round_to)
    most = min(int(at_most * width), width - unit)
    first = width % unit or unit
    counts = range(first, most + 1, unit)
    return [*counts[:: -(-len(counts) // _MOST_COUNTS)]] if counts else []


@dataclass(frozen=True)
class _Layer:
    """Positions per step, and sizes of the weight: each with the neurons that can leave it."""

    positions: float
    sizes: Sequence[tuple[int, Mapping[str, int]]]  # by name, how many entries one neuron has
    output: int
    multiplies: bool


class Work:
    """The multiplications of a step by widths; `positions` are those of a layer's output."""

    def __init__(
        self,
        model: nn.Module,
        neurons: Sequence[Neurons],
        positions: Mapping[str, float],
        round_to: int,
    ) -> None:
        self._round_to = round_to
        self._layers: dict[str, _Layer] = {}
        self._of: dict[str, list[str]] = {each.name: [] for each in neurons}
        for path, count in positions.items():
            module, sizes = model.get_submodule(path), []
            weight = weight_of(module)
            for dim, size in enumerate(weight.shape):
                key = f"{path}.weight {dim}"
                per_neuron = {
                    each.name: each.entries[key].indices.shape[1]
                    for each in neurons
                    if key in each.entries
                }
                sizes.append((size, per_neuron))
                for name in per_neuron:
                    if path not in self._of[name]:  # a list: ranks add in one order
                        self._of[name].append(path)
            multiplies = weight.ndim > 1 and not isinstance(module, nn.Embedding)
            self._layers[path] = _Layer(count, sizes, output_dim(module), multiplies)

    def near(self, name: str) -> set[str]:
        """Return the names of neurons whose saving depends on these, themselves included."""
        layers = {*self._of[name]}
        return {other for other, paths in self._of.items() if layers & {*paths}}

    def saving(self, name: str, now: Mapping[str, Count], removed: Count) -> Count:
        """Return what is saved if so many of these are removed instead of as many as now."""
        then = {**now, name: removed}
        return sum(self._cost(path, now) - self._cost(path, then) for path in self._of[name])

    def whole(self, removed: Mapping[str, Count]) -> Count:
        """Return the cost of all layers."""
        return sum(self._cost(path, removed) for path in self._layers)

    def _cost(self, path: str, removed: Mapping[str, Count]) -> Count:
        layer, product, output = self._layers[path], 1.0, 0.0
        for dim, (size, per_neuron) in enumerate(layer.sizes):
            left = size - sum(removed.get(name, 0) * n for name, n in per_neuron.items())
            if dim == layer.output:
                output = left
            product *= -(-left // self._round_to) * self._round_to if per_neuron else left
        return layer.positions * (product * layer.multiplies + _PER_OUTPUT * output)


def plan_counts(options: Sequence[Options], work: Work, budget: float) -> dict[str, int]:
    """Return by name which option to take, so that the sum of errors is within a budget.

    Greedy: again and again what saves the most time per unit of further error.
    """
    by_name = {each.neurons.name: each for each in options}
    taken = dict.fromkeys(by_name, 0)
    removed = dict.fromkeys(by_name, 0)
    best: dict[str, tuple[float, int, float]] = {}
    stale = {*by_name}
    left = budget
    while True:
        stale |= {name for name, (_, _, further) in best.items() if further > left}
        for name in stale:
            best.pop(name, None)
            found = _best(by_name[name], taken[name], work, removed, left)
            if found is not None:
                best[name] = found
        if not best:
            return {name: chosen for name, chosen in taken.items() if chosen}
        name = max(sorted(best), key=lambda each: best[each][0])
        _, taken[name], further = best.pop(name)
        removed[name] = by_name[name].counts[taken[name]]
        left -= further
        stale = work.near(name) & by_name.keys()


def _best(
    options: Options, taken: int, work: Work, removed: Mapping[str, int], left: float
) -> tuple[float, int, float] | None:
    """Return the most time per error that a further option saves, which it is, and its error."""
    errors = np.array(options.errors[taken + 1 :])
    further = np.maximum(0.0, errors - options.errors[taken])
    counts = np.array(options.counts[taken + 1 :])
    saved = work.saving(options.neurons.name, removed, counts)
    values = saved / (further + _NOTHING)
    is_open = (further <= left) & (saved > 0) & (values >= _LEAST * work.whole(removed))
    if not is_open.any():
        return None
    best = int(np.where(is_open, values, -1.0).argmax())
    return float(values[best]), taken + 1 + best, float(further[best])
