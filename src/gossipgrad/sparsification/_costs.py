"""What selection and collectives cost here: measured with the code that does them, bit by bit."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from gossipgrad.comm import Group
from gossipgrad.planning import Method, PiecewiseCost
from gossipgrad.sparsification._density import counts_of
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["CostMeasurement", "Costs"]

_FIRST_ELEMENTS = 256
_GROWTH = 4
_MOST_ELEMENTS = 1 << 22
_RUNS = 4  # of a size, of which the first takes memory and does not count
_FEWEST_SIZES = 2  # that a line needs
_LONGEST_RUN = 2.0  # steps: a size that is expected to take longer is not measured
_NO_TIME_SECONDS = 1e-9  # what clocks cannot tell from nothing is still above it


@dataclass(frozen=True, slots=True)
class Costs:
    """Curves of one method, by elements of a group.

    Attributes:
        name: Of the method.
        elements: Sizes that were measured.
        select_seconds: Residual, selection and packing.
        communicate_seconds: The collective, and adding up what came.
    """

    name: str
    elements: tuple[int, ...]
    select_seconds: tuple[float, ...]
    communicate_seconds: tuple[float, ...]

    def method(self) -> Method:
        """As the planner takes it."""
        return Method(
            name=self.name,
            select_seconds=PiecewiseCost.fit(self.elements, self.select_seconds),
            communicate_seconds=PiecewiseCost.fit(self.elements, self.communicate_seconds),
        )


class CostMeasurement:
    """Measures every method that a plan may use, a little after each step.

    A group of random gradients goes through selection and collective, for sizes that grow by four.
    Each time is a median over runs and ranks, so all ranks decide alike. After a step as much is
    measured as takes about one more step. A size that is expected to take longer than two steps is
    not measured: costs go on with the slope of the last two sizes.

    Where each tensor has a number of coordinates of its own, a group of a size has as many tensors
    of equal size as one of the model has on average.

    Args:
        settings: Of the session.
        group: Whose ranks measure; nothing else may be under way on it in `advance`.
        device: Where gradients are.
        dtype: Of the gradients.
        elements: Of all parameters together.
        tensors: How many parameters these are.
        density: The share that sparse messages have.
        step_seconds: What a step takes; the same on all ranks.
    """

    def __init__(
        self,
        settings: Settings,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        *,
        elements: int,
        tensors: int,
        density: float,
        step_seconds: float,
    ) -> None:
        self._settings, self._group = settings, group
        self._device, self._dtype = device, dtype
        self._elements, self._tensors, self._density = elements, tensors, density
        self._step_seconds = step_seconds
        self._costs: list[Costs] = []
        self._begun_seconds = 0.0
        self._runs = self._measure_all()

    def advance(self) -> list[Costs] | None:
        """Measures for about a step's time; the costs once all is measured. A collective."""
        self._begun_seconds = perf_counter()
        while (spent_seconds := next(self._runs, None)) is not None:
            if spent_seconds > self._step_seconds:
                return None
        return self._costs

    def _measure_all(self) -> Iterator[float]:
        for name in self._settings.methods:
            sizes: list[int] = []
            times: list[tuple[float, float, float]] = []
            for size in _sizes(self._elements):
                expected_seconds = _GROWTH * sum(times[-1]) if times else 0.0
                too_long = expected_seconds > _LONGEST_RUN * self._step_seconds
                if too_long and len(sizes) >= _FEWEST_SIZES:
                    break
                runs: list[tuple[float, float, float]] = []
                trial = _Trial(
                    name,
                    size,
                    self._count(size),
                    self._settings,
                    self._group,
                    self._device,
                    self._dtype,
                    self._density,
                )
                while len(runs) < _RUNS:
                    taken = trial.run(self._group)
                    select, gather, add, spent = self._agree(taken)
                    runs.append((select, gather, add))
                    yield spent
                    if select + gather + add > self._step_seconds:
                        break  # as good as it gets
                sizes.append(size)
                counted = runs[1:] or runs
                select, gather, add = (
                    statistics.median(each) for each in zip(*counted, strict=True)
                )
                times.append((select, gather, add))
            self._costs.append(_costs_of(name, sizes, times))

    def _count(self, size: int) -> int:
        if self._settings.select != "per_tensor":
            return 1
        return max(1, round(self._tensors / self._elements * size))

    def _agree(self, run: tuple[float, float, float]) -> list[float]:
        """Medians over ranks: of a run, and of what has been spent since training waits."""
        mine = [*run, perf_counter() - self._begun_seconds]
        of_ranks = self._group.all_gather_object(mine)
        return [statistics.median(each) for each in zip(*of_ranks, strict=True)]


def _costs_of(
    name: str, sizes: Sequence[int], times: Sequence[tuple[float, float, float]]
) -> Costs:
    """The curves through what was measured; no element takes less than the last ones did.

    Links that were idle let a short message pass faster than their rate. In a step others come
    right before it.
    """
    gathers = [gather for _, gather, _ in times]
    slope = max(0.0, (gathers[-1] - gathers[-2]) / (sizes[-1] - sizes[-2]))
    slope = min(slope, gathers[-1] / sizes[-1])
    return Costs(
        name,
        tuple(sizes),
        tuple(max(select, _NO_TIME_SECONDS) for select, _, _ in times),
        tuple(
            max(gather, slope * size, _NO_TIME_SECONDS) + add
            for size, (_, gather, add) in zip(sizes, times, strict=True)
        ),
    )


def _sizes(elements: int) -> list[int]:
    sizes = []
    size = _FIRST_ELEMENTS
    last = min(elements, _MOST_ELEMENTS)
    while size < last:
        sizes.append(size)
        size *= _GROWTH
    return [*sizes, last] if sizes else [last, 2 * last]


class _Trial:
    """One group of a size, with gradients that are as good as any."""

    def __init__(
        self,
        method: str,
        size: int,
        tensors: int,
        settings: Settings,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
        density: float,
    ) -> None:
        self._device = device
        per_tensor = settings.select == "per_tensor"
        generator = torch.Generator(device).manual_seed(size)
        grad = torch.randn(size, generator=generator, device=device).to(dtype)
        self._grads = list(grad.tensor_split(tensors))
        self._made = MergedGroup(
            [nn.Parameter(torch.zeros_like(piece)) for piece in self._grads],
            method,
            world_size=group.world_size,
            per_tensor=per_tensor,
            value_dtype=settings.value_dtype,
            momentum=settings.momentum_correction,
        )
        sizes = [len(piece) for piece in self._grads]
        self._made.use_counts(counts_of(sizes, [density] * tensors, per_tensor=per_tensor))

    def run(self, group: Group) -> tuple[float, float, float]:
        """Seconds of selection, of the collective, and of the sum."""
        begun = self._now()
        self._made.begin(self._grads)
        select = self._now() - begun
        # Who has waited long in the first looks less often and leaves it late, which would count
        # as time of the collective on all others; in the second nobody waits long.
        group.barrier()
        group.barrier()
        begun = perf_counter()
        self._made.exchange(group)
        took = perf_counter() - begun
        self._made.accept()
        gather = min(took, self._made.timing.gather_seconds)
        return select, gather, took - gather

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()
