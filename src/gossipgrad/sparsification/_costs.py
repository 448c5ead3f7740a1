"""Measurement of the cost of selection and collectives, with their own code, step by step."""

import statistics
from collections.abc import Generator, Sequence
from time import perf_counter

import torch
from torch import nn

from gossipgrad.comm import Group
from gossipgrad.planning import Method, PiecewiseCost
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["measure_methods"]

_FIRST_ELEMENTS = 256
_GROWTH = 8
_MOST_ELEMENTS = 1 << 22
_RUNS = 3  # per size, after one that allocates memory
_FEWEST_SIZES = 2  # for a line
_LONGEST_RUN = 2.0  # steps: a size that is expected to take longer is not measured
_NO_TIME_SECONDS = 1e-9  # a lower bound for times below the clock's resolution

Times = tuple[float, float, float]


def measure_methods(
    settings: Settings,
    group: Group,
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    *,
    density: float,
    step_seconds: float,
) -> Generator[None, None, list[Method]]:
    """Measure every method that a plan may use; yield after about a step's time."""
    # Each time is the least of some runs, and a median over ranks, so all ranks decide alike. A
    # size that is expected to take longer than two steps is not measured: costs continue with the
    # slope of the last two sizes.
    elements = sum(p.numel() for p in parameters)
    begun_seconds = perf_counter()
    methods: list[Method] = []
    for name in settings.methods:
        times: list[Times] = []
        sizes: list[int] = []
        for size in _sizes(elements):
            too_long = bool(times) and _GROWTH * sum(times[-1]) > _LONGEST_RUN * step_seconds
            if too_long and len(sizes) >= _FEWEST_SIZES:
                break
            tensors = 1
            if settings.select == "per_tensor":
                tensors = max(1, round(len(parameters) / elements * size))
            grads = _random_gradients(size, tensors, parameters[0].device, dtype)
            made = _make_group(name, grads, settings, group, density)
            for count in (1, _RUNS):
                runs = [_run_once(made, grads, group) for _ in range(count)]
                mine = [*map(min, zip(*runs, strict=True))]  # what else the machine does only adds
                of_ranks = group.all_gather_object([*mine, perf_counter() - begun_seconds])
                select, gather, add, spent = map(statistics.median, zip(*of_ranks, strict=True))
                if spent > step_seconds:
                    yield
                    begun_seconds = perf_counter()
                if len(sizes) >= _FEWEST_SIZES and select + gather + add > step_seconds:
                    break  # once is enough
            sizes.append(size)
            times.append((select, gather, add))
        methods.append(_make_method(name, sizes, times))
    return methods


def _make_method(name: str, sizes: Sequence[int], times: Sequence[Times]) -> Method:
    """Fit curves through the measurements; an element costs at least as much as the last ones."""
    # An idle link passes a short message faster than its rate. In a step, other messages precede
    # it.
    gathers = [gather for _, gather, _ in times]
    slope = max(0.0, (gathers[-1] - gathers[-2]) / (sizes[-1] - sizes[-2]))
    slope = min(slope, gathers[-1] / sizes[-1])
    selects = [max(select, _NO_TIME_SECONDS) for select, _, _ in times]
    arrivals = [
        max(gather, slope * size, _NO_TIME_SECONDS) + add
        for size, (_, gather, add) in zip(sizes, times, strict=True)
    ]
    return Method(name, PiecewiseCost.fit(sizes, selects), PiecewiseCost.fit(sizes, arrivals))


def _sizes(elements: int) -> list[int]:
    sizes = []
    size = _FIRST_ELEMENTS
    last = min(elements, _MOST_ELEMENTS)
    while size < last:
        sizes.append(size)
        size *= _GROWTH
    return [*sizes, last] if sizes else [last, 2 * last]


def _random_gradients(
    size: int, tensors: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(size)
    grad = torch.randn(size, generator=generator, device=device).to(dtype)
    return list(grad.tensor_split(tensors))


def _make_group(
    method: str, grads: Sequence[torch.Tensor], settings: Settings, group: Group, density: float
) -> MergedGroup:
    made = MergedGroup(
        grads,
        method,
        world_size=group.world_size,
        per_tensor=settings.select == "per_tensor",
        value_dtype=settings.value_dtype,
        momentum=settings.momentum_correction,
    )
    made.use_density(density)
    return made


def _run_once(made: MergedGroup, grads: Sequence[torch.Tensor], group: Group) -> Times:
    """Return the seconds of selection, of the collective, and of the sum."""
    begun = _now(grads[0].device)
    made.begin(grads)
    select = _now(grads[0].device) - begun
    # A rank that has waited long in the first polls less often and leaves it late, which would
    # count as time of the collective on all others; in the second no rank waits long.
    group.barrier()
    group.barrier()
    begun = perf_counter()
    made.exchange(group)
    took = perf_counter() - begun
    made.accept()
    gather = min(took, made.gather_seconds)
    return select, gather, took - gather


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()
