"""What selection and collectives cost here: measured with the code that will do them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from gossipgrad.comm import Group
from gossipgrad.planning import Method, PiecewiseCost
from gossipgrad.sparsification._density import counts_of
from gossipgrad.sparsification._merged import MergedGroup
from gossipgrad.sparsification._settings import Settings

__all__ = ["Costs", "measure_costs"]

_FIRST_ELEMENTS = 256
_GROWTH = 4
_MOST_ELEMENTS = 1 << 24
_LONG_SECONDS = 0.5  # a size that takes longer is the last, what is above goes on with the slope:
_FEWEST_SIZES = 3  # but not before that many
_TIMES = 5
_MOST_SECONDS = 0.25  # for the repetitions of one size
_MOST_AT_ONCE_BYTES = 1 << 20  # of which there are as many copies as ranks
_LOSSES = 2  # at a size before messages to all at once are given up: one may be noise
_NO_TIME_SECONDS = 1e-9  # what clocks cannot tell from nothing is still above it


@dataclass(frozen=True, slots=True)
class Costs:
    """Curves of one method, by elements of a group.

    Attributes:
        name: Of the method.
        elements: Sizes that were measured.
        select_seconds: Residual, selection and packing.
        communicate_seconds: The collective, and adding up what came.
        at_once_bytes: Up to which size the method's messages went to all at once, as
            `Group.at_once_bytes` has it; None if it gathers none.
        message_bytes: Of a message at each size; empty if the method gathers none.
        gather_seconds: The collective of these messages.
    """

    name: str
    elements: tuple[int, ...]
    select_seconds: tuple[float, ...]
    communicate_seconds: tuple[float, ...]
    at_once_bytes: int | None = None
    message_bytes: tuple[int, ...] = ()
    gather_seconds: tuple[float, ...] = ()

    def method(self) -> Method:
        """As the planner takes it."""
        return Method(
            name=self.name,
            select_seconds=PiecewiseCost.fit(self.elements, self.select_seconds),
            communicate_seconds=PiecewiseCost.fit(self.elements, self.communicate_seconds),
        )


def measure_costs(
    settings: Settings,
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    *,
    elements: int,
    tensors: int,
    density: float,
    known: Sequence[Costs] = (),
) -> list[Costs]:
    """The costs of every method that a plan may use, the same on all ranks; a collective.

    A group of random gradients goes through selection and collective, for sizes that grow by four
    up to all parameters, but 2^24 elements at most: costs of larger groups follow the last slope.
    All ranks begin together, and each time is the median over repetitions and ranks: up to five
    after one that takes memory, as many as there is time for in a quarter of a second; a size that
    takes longer than half of that is timed once. The first from the third on that takes more than
    half a second is the last: slower networks are not held up for longer than a few such. A size
    counts no less than at the rate of the largest: links that were idle let short messages pass
    faster.

    Where each tensor has a number of coordinates of its own, a group of a size has as many tensors
    of equal size as one of the model has on average.

    Sparse messages are measured round a ring and, as long as that is faster, to all at once; what
    was faster is what counts. A size at which the ring is faster is measured both ways once more,
    and larger ones go round it if it is so again. The costs say up to where messages went to all at
    once; the group is left as it was, and has to be set so while they hold.

    Of what is known from another density, dense collectives hold. Sparse messages take what those
    of their size did, if there were some as large; selection and adding up are measured anew then,
    which takes no communication but a word at the end.

    Args:
        settings: Of the session.
        group: Whose ranks measure; nothing else may be under way.
        device: Where gradients are.
        dtype: Of the gradients.
        elements: Of all parameters together.
        tensors: How many parameters these are.
        density: The share that sparse messages have.
        known: What was measured at other densities, of as many elements; equal on all ranks.
    """
    share = tensors / elements if settings.select == "per_tensor" else 0.0

    def trial(name: str, size: int) -> _Trial:
        count = max(1, round(share * size))
        return _Trial(name, size, count, settings, group.world_size, device, dtype, density)

    return [
        _taken_over([costs for costs in known if costs.name == name], group, elements, trial)
        or _measure(name, group, elements, trial)
        for name in settings.methods
    ]


def _measure(
    name: str, group: Group, elements: int, trial_of: Callable[[str, int], "_Trial"]
) -> Costs:
    sizes, message_bytes, selects, gathers, adds = [], [], [], [], []
    before, at_once_bytes = group.at_once_bytes, 0
    sparse = name == "sparse"
    at_once = sparse and group.world_size > 2
    try:
        for size in _sizes(elements):
            trial = trial_of(name, size)
            at_once = at_once and trial.message_bytes <= _MOST_AT_ONCE_BYTES
            if at_once:
                select, gather, add, at_once = _faster(trial, group)
            else:
                group.at_once_bytes = 0
                select, gather, add = _timed(trial, group)
            if at_once:
                at_once_bytes = trial.message_bytes
            sizes.append(size)
            message_bytes.append(trial.message_bytes)
            selects.append(max(select, _NO_TIME_SECONDS))
            gathers.append(max(gather, _NO_TIME_SECONDS))
            adds.append(add)
            if select + gather + add > _LONG_SECONDS and len(sizes) >= _FEWEST_SIZES:
                break
    finally:
        group.at_once_bytes = before
    gathers = _sustained(sizes, gathers)
    return Costs(
        name,
        tuple(sizes),
        tuple(selects),
        tuple(gather + add for gather, add in zip(gathers, adds, strict=True)),
        at_once_bytes if sparse else None,
        tuple(message_bytes) if sparse else (),
        gathers if sparse else (),
    )


def _taken_over(
    known: Sequence[Costs],
    group: Group,
    elements: int,
    trial_of: Callable[[str, int], "_Trial"],
) -> Costs | None:
    """The costs at another density than these were measured at; None if that takes a collective.

    They go up to the size whose message is as large as the largest that was measured: past the
    sizes of then, where a slow network ended these and messages are shorter now.
    """
    if not known:
        return None
    former = max(known, key=lambda costs: costs.message_bytes[-1:])
    if not former.message_bytes:
        return former
    if len({*former.message_bytes}) < 2:
        return None
    largest_bytes = former.message_bytes[-1]
    if trial_of(former.name, former.elements[-1]).message_bytes > largest_bytes:
        return None
    sizes, message_bytes, mine = [], [], []
    for size in _sizes(elements):
        trial = trial_of(former.name, size)
        if trial.message_bytes > largest_bytes:
            break
        sizes.append(size)
        message_bytes.append(trial.message_bytes)
        mine.append(_rehearsed(trial))
    told = group.all_gather_object(mine)
    times = [_medians(of_ranks) for of_ranks in zip(*told, strict=True)]
    gather = PiecewiseCost.fit(former.message_bytes, former.gather_seconds)
    gathers = tuple(gather(each) for each in message_bytes)
    return Costs(
        former.name,
        tuple(sizes),
        tuple(max(select, _NO_TIME_SECONDS) for select, _ in times),
        tuple(taken + add for taken, (_, add) in zip(gathers, times, strict=True)),
        former.at_once_bytes,
        tuple(message_bytes),
        gathers,
    )


def _faster(trial: "_Trial", group: Group) -> tuple[float, float, float, bool]:
    """Seconds of selection, collective and sum, and whether the second went to all at once."""
    select = ring = add = 0.0
    for _ in range(_LOSSES):
        group.at_once_bytes = 0
        select, ring, add = _timed(trial, group)
        group.at_once_bytes = trial.message_bytes
        _, at_once, _ = _timed(trial, group)
        if at_once < ring:
            return select, at_once, add, True
    return select, ring, add, False


def _sustained(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """No element takes less than the last ones did.

    A link that has been idle may let a short message pass faster than its rate; in a step others
    come right before it.
    """
    (before, last), (earlier, end) = sizes[-2:], seconds[-2:]
    slope = min(max(0.0, (end - earlier) / (last - before)), end / last)
    return tuple(max(each, slope * size) for size, each in zip(sizes, seconds, strict=True))


def _timed(trial: "_Trial", group: Group) -> tuple[float, float, float]:
    """Seconds of selection, of the collective and of the sum, the same on all ranks."""
    times = _together(group, [trial.run(group)])
    count = _repetitions(sum(times))
    if count > 1:  # the first was also the one that took memory
        times = _together(group, [trial.run(group) for _ in range(count)])
    return times


def _rehearsed(trial: "_Trial") -> list[float]:
    """Seconds of selection and of the sum on this rank."""
    times = [trial.rehearse()]
    count = _repetitions(sum(times[0]))
    if count > 1:
        times = [trial.rehearse() for _ in range(count)]
    return _medians(times)


def _repetitions(seconds: float) -> int:
    return min(_TIMES, int(_MOST_SECONDS / max(seconds, 1e-6)))


def _sizes(elements: int) -> list[int]:
    sizes = []
    size = _FIRST_ELEMENTS
    while size < min(elements, _MOST_ELEMENTS):
        sizes.append(size)
        size *= _GROWTH
    last = min(elements, _MOST_ELEMENTS)
    return [*sizes, last] if sizes else [last, 2 * last]


def _together(
    group: Group, runs: Sequence[tuple[float, float, float]]
) -> tuple[float, float, float]:
    """Medians over runs, then over ranks."""
    select, gather, add = _medians(group.all_gather_object(_medians(runs)))
    return select, gather, add


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


class _Trial:
    """One group of a size, with gradients that are as good as any."""

    def __init__(
        self,
        method: str,
        size: int,
        tensors: int,
        settings: Settings,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
        density: float,
    ) -> None:
        self._device = device
        per_tensor = settings.select == "per_tensor"
        generator = torch.Generator(device).manual_seed(size)
        grad = torch.randn(size, generator=generator, device=device).to(dtype)
        self._grads: list[Any] = list(grad.tensor_split(tensors))
        self._made = MergedGroup(
            [nn.Parameter(torch.zeros_like(piece)) for piece in self._grads],
            method,
            world_size=world_size,
            per_tensor=per_tensor,
            value_dtype=settings.value_dtype,
            momentum=settings.momentum_correction,
        )
        sizes = [len(piece) for piece in self._grads]
        densities = [density] * tensors
        self._made.use_counts(counts_of(sizes, densities, per_tensor=per_tensor))
        self.message_bytes = self._made.bytes_sent // max(1, world_size - 1)

    def run(self, group: Group) -> tuple[float, float, float]:
        """Seconds of selection, of the collective, and of the sum."""
        group.barrier()
        select = self._select()
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

    def rehearse(self) -> tuple[float, float]:
        """Seconds of selection, and of the sum, of a sparse group; local."""
        select = self._select()
        begun = self._now()
        self._made.rehearse()
        add = self._now() - begun
        self._made.accept()
        return select, add

    def _select(self) -> float:
        start = self._now()
        self._made.begin(self._grads)
        return self._now() - start

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()
