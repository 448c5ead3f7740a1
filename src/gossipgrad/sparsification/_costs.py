"""Measurement of the cost of selection and collectives, with their own code, step by step."""

import statistics
from collections.abc import Generator, Mapping, Sequence
from time import perf_counter

import torch
from torch import nn

from gossipgrad.comm import Group
from gossipgrad.planning import Method, PiecewiseCost
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["measure_methods"]

_FEWEST_ELEMENTS = 1 << 10
_SHRINKS = 16  # from one size to the next
_MOST_ELEMENTS = 1 << 22
_RUNS = 3  # per size; the first allocates memory and does not count
_NO_TIME_SECONDS = 1e-9  # a lower bound for times below the clock's resolution

Times = tuple[float, ...]
"""Seconds of selection, of the collective, and of the sum."""


def measure_methods(
    settings: Settings,
    group: Group,
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype,
    *,
    density: float,
    dense_seconds: float | None,
) -> Generator[None, None, tuple[list[Method], str | None]]:
    """Measure every method that a plan may use; yield after each run, so a step has one.

    Return the methods, and why none is sparse: all elements together take longer sparse than the
    time of their all-reduce in steps, if that is given, so every part does.
    """
    # Each time is the least of some runs, as what else the machine does only adds, and a median
    # over ranks, so all ranks decide alike.
    elements = sum(p.numel() for p in parameters)
    sizes = _sizes(elements)
    names = settings.methods if settings.plan == "optimal" else settings.methods[:1]
    mine: dict[str, dict[int, Times]] = {name: {} for name in names}
    if dense_seconds is not None:
        mine["dense"][sizes[0]] = 0.0, dense_seconds * sizes[0] / elements, 0.0
    refused = None
    for name in names:
        for size in sizes:
            if size in mine[name]:
                continue
            random = torch.Generator(parameters[0].device).manual_seed(size)
            gradient = torch.randn(size, generator=random, device=random.device).to(dtype)
            made = MergedGroup(
                [gradient],
                name,
                world_size=group.world_size,
                value_dtype=settings.value_dtype,
                momentum=settings.momentum_correction,
            )
            made.use_density(density)
            runs = []
            for _ in range(_RUNS):
                runs.append(_run_once(made, gradient, group))
                yield
            mine[name][size] = tuple(map(min, zip(*runs[1:], strict=True)))
            if name == "sparse" and size == sizes[0] and dense_seconds is not None:
                sparse, dense = (sum(_agreed(mine, group)[of][size]) for of in ("sparse", "dense"))
                if sparse >= dense:
                    refused = (
                        f"to select and exchange {density:g} of {size:,} elements takes "
                        f"{1e3 * sparse:.3g} ms, and their all-reduce {1e3 * dense:.3g} ms"
                    )
                    del mine["sparse"]
                    sizes = sizes[:1]  # nothing is left to plan
                    break
    return [_make_method(name, times) for name, times in _agreed(mine, group).items()], refused


def _agreed(mine: Mapping[str, Mapping[int, Times]], group: Group) -> dict[str, dict[int, Times]]:
    """Return medians over ranks."""
    keys = [(name, size) for name, times in mine.items() for size in times]
    of_ranks = group.all_gather_object([mine[name][size] for name, size in keys])
    agreed: dict[str, dict[int, Times]] = {name: {} for name in mine}
    for (name, size), all_times in zip(keys, zip(*of_ranks, strict=True), strict=True):
        agreed[name][size] = tuple(map(statistics.median, zip(*all_times, strict=True)))
    return agreed


def _make_method(name: str, times: Mapping[int, Times]) -> Method:
    """Fit curves through the measurements; an element costs at least as much as the last ones."""
    # An idle link passes a short message faster than its rate. In a step, other messages precede
    # it.
    sizes = sorted(times)
    before, last = (sizes[-2], sizes[-1]) if len(sizes) > 1 else (0, sizes[-1])
    gather = {0: 0.0} | {size: of[1] for size, of in times.items()}
    slope = max(0.0, (gather[last] - gather[before]) / (last - before))
    slope = min(slope, gather[last] / last)
    if len(sizes) == 1:
        sizes = [max(1, last // 2), last]
    selects, arrivals = [], []
    for size in sizes:
        select, gather_seconds, add = times.get(size, (0.0, 0.0, 0.0))
        selects.append(max(select, _NO_TIME_SECONDS))
        arrivals.append(max(gather_seconds, slope * size, _NO_TIME_SECONDS) + add)
    return Method(name, PiecewiseCost.fit(sizes, selects), PiecewiseCost.fit(sizes, arrivals))


def _sizes(elements: int) -> list[int]:
    """Return the sizes to measure, the largest first; two or more."""
    sizes = [min(elements, _MOST_ELEMENTS)]
    while sizes[-1] >= _SHRINKS * _FEWEST_ELEMENTS:
        sizes.append(sizes[-1] // _SHRINKS)
    return sizes if len(sizes) > 1 else [2 * elements, elements]


def _run_once(made: MergedGroup, gradient: torch.Tensor, group: Group) -> Times:
    """Return the seconds of selection, of the collective, and of the sum."""
    begun = _now(gradient.device)
    made.begin([gradient])
    select = _now(gradient.device) - begun
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
