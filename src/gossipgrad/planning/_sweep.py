"""One pass over all tensors, from the first gradient or from the last, that makes fronts."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Int

from ._fronts import Front, members, pareto, pieces
from ._ranges import Choices
from ._states import Made, States

__all__ = ["Keep", "Swept", "knowing_nothing", "sweep"]

_AT_ONCE = 1 << 20  # states made in one go, which bounds memory


class Keep(Enum):
    """What is kept of a front that holds too much."""

    BEST = "one state, as good in each time as the best: a bound comes out"
    MEMBERS = "some of the states: a plan comes out, and a bound where all could be kept"
    PIECES = "convex hulls of its parts, mixtures and all: a bound comes out"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a pass has found.

    Attributes:
        fronts: Of each place between tensors, from 0; None where nothing is good enough.
        finish_seconds: The least at the other end; infinite if nothing came there.
        chosen: The choices on the way to it, in the order of the tensors.
        useful: Which choices a plan that is good enough may have; of no use without a bound.
        made: How many states were looked at.
        below: What a plan had to finish before, in the end.
        bounds: Whether every plan that is good enough is in the fronts, or a mixture before it.
    """

    fronts: list[Front | None]
    finish_seconds: float
    chosen: list[int]
    useful: Bool[np.ndarray, " choice"]
    made: int
    below: float
    bounds: bool


@dataclass(frozen=True, slots=True)
class _Arrows:
    """The choices in the order of a pass: each leads from a place to another, at two costs."""

    choice: Int[np.ndarray, " arrow"]
    source: Int[np.ndarray, " arrow"]
    first_cost: Float[np.ndarray, " arrow"]
    second_cost: Float[np.ndarray, " arrow"]
    clock: Float[np.ndarray, " arrow"]
    into: list[tuple[int, int]]
    """Of each place the arrows that lead there, from and to."""

    @classmethod
    def of(
        cls, choices: Choices, reached: Float[np.ndarray, " place"], *, forward: bool
    ) -> "_Arrows":
        if forward:
            order = np.arange(choices.stop.size)  # they are sorted so
            source, target = choices.start, choices.stop
            first, second = choices.select, choices.communicate
        else:
            order = np.argsort(choices.start, kind="stable")
            source, target = choices.stop[order], choices.start[order]
            first, second = choices.communicate[order], choices.select[order]
        bounds = np.searchsorted(target, np.arange(len(reached) + 1)).tolist()
        return cls(
            choice=order,
            source=source.astype(np.int64),
            first_cost=first,
            second_cost=second,
            clock=reached[choices.stop[order]],
            into=list(pairwise(bounds)),
        )


def knowing_nothing(tensors: int) -> list[Front | None]:
    """Fronts of another end where all is free."""
    nothing = Front(np.zeros(1), np.zeros(1), np.zeros(1, bool))
    return [nothing] * (tensors + 1)


def sweep(
    choices: Choices,
    reached: Float[np.ndarray, " place"],
    ahead: list[Front | None],
    *,
    forward: bool,
    keep: Keep,
    width: int,
    below: float,
    patience: int,
    hard_below: float,
    most: int,
) -> Swept | None:
    """Make the front of every place from those before it.

    What is not good enough may become more along the way: who was kept before is kept for nothing.

    Args:
        choices: Groups that may be taken.
        reached: Seconds of backward up to each place.
        ahead: Fronts from the other end: what can still be made of a state.
        forward: From the first gradient; else from the last.
        keep: How a front is made small.
        width: How many states it may hold then; a hull has as many as it has.
        below: What does not finish before this is not good enough.
        patience: States that are looked at with that; negative for none.
        hard_below: The same for all others, no larger.
        most: States that may be looked at.

    Returns:
        What was found; None if that would have been too much work.
    """
    last = len(reached) - 1
    arrows = _Arrows.of(choices, reached, forward=forward)
    states = States(last + 1, 0 if forward else last)
    useful = np.zeros(choices.start.size, bool)
    total, bounds = 0, True
    for place in range(1, last + 1) if forward else range(last - 1, -1, -1):
        front = ahead[place]
        if front is None:
            continue
        if total > patience:
            below = hard_below
        parts = []
        for arrow in _promising(arrows, states, place, front, below):
            made = _extended(arrows, states, front, arrow)
            total += made.finish.size
            parts.append(_good(made, below))
            useful[parts[-1].choice] = True
            if total > most:
                return None
        if parts and (found := _joined(parts)).finish.size:
            narrowed, whole = _narrowed(found, keep, width)
            states.add(place, narrowed)
            bounds &= whole
    end = last if forward else 0
    front = states.front(end)
    return Swept(
        fronts=[states.front(place) for place in range(last + 1)],
        finish_seconds=np.inf if front is None else float(front.second[-1]),
        chosen=sorted(states.way_to(end)),
        useful=useful,
        made=total,
        below=below,
        bounds=bounds,
    )


def _promising(
    arrows: _Arrows, states: States, place: int, ahead: Front, below: float
) -> Iterator[Int[np.ndarray, " arrow"]]:
    """Arrows to a place that may be good enough, by the best of each time; some at a time."""
    arrow = np.arange(*arrows.into[place])
    arrow = arrow[states.count[arrows.source[arrow]] > 0]
    if not arrow.size:
        return
    source = arrows.source[arrow]
    first = states.least_first[source] + arrows.first_cost[arrow]
    second = np.maximum(states.least_second[source], arrows.clock[arrow] + first)
    finish = ahead.finish(first, second + arrows.second_cost[arrow])
    arrow = arrow[finish < below]
    if arrow.size:
        made = np.cumsum(states.count[arrows.source[arrow]])
        yield from np.split(arrow, np.flatnonzero(np.diff(made // _AT_ONCE)) + 1)


def _extended(
    arrows: _Arrows, states: States, ahead: Front, arrow: Int[np.ndarray, " arrow"]
) -> Made:
    """All states that these arrows make of those at their sources."""
    source = arrows.source[arrow]
    count = states.count[source]
    ends = np.cumsum(count)
    run = np.repeat(np.arange(arrow.size), count)
    parent = np.arange(ends[-1]) - (ends - count - states.start[source])[run]
    along = arrow[run]
    joined = states.joined[parent]
    first = states.first[parent] + arrows.first_cost[along]
    second, floor = states.second[parent], arrows.clock[along] + first
    # A run falls until it meets the floor, which rises: all past that is worse.
    sunk = floor > second
    met = sunk.copy()
    met[1:] &= ~sunk[:-1] | (run[1:] != run[:-1])
    cut = np.flatnonzero(met & joined)
    above, under = second[cut - 1] - floor[cut - 1], floor[cut] - second[cut]
    first[cut] -= under / (above + under) * (first[cut] - first[cut - 1])
    second[cut] = floor[cut] = arrows.clock[along[cut]] + first[cut]
    kept = np.flatnonzero(met | ~sunk)
    first, along, joined = first[kept], along[kept], joined[kept]
    second = np.maximum(second[kept], floor[kept]) + arrows.second_cost[along]
    # No mixture with the one before is better than this.
    least = np.where(joined, np.concatenate([first[:1], first[:-1]]), first)
    finish = ahead.finish(least, second)
    return Made(first, second, joined, finish, arrows.choice[along], parent[kept])


def _good(made: Made, below: float) -> Made:
    """Those of which something good enough may come, or of a mixture with a neighbour."""
    good = made.finish < below
    joined = made.joined & good
    good[:-1] |= joined[1:]
    return made._replace(joined=joined).take(np.flatnonzero(good))


def _joined(parts: list[Made]) -> Made:
    if len(parts) == 1:
        return parts[0]
    return Made(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _narrowed(made: Made, keep: Keep, width: int) -> tuple[Made, bool]:
    """What is kept, and whether it bounds all that was made."""
    if keep is Keep.PIECES:
        front, origin = pieces(made.first, made.second, made.joined, width)
        kept = made.take(origin)
        return kept._replace(first=front.first, second=front.second, joined=front.joined), True
    made = made.take(pareto(made.first, made.second))
    if keep is Keep.BEST:
        best = made.take(np.array([0]))
        return best._replace(first=made.first[:1], second=made.second[-1:]), True
    if made.finish.size <= width:
        return made, True
    return made.take(members(made.first, made.second, made.finish, width)), False
