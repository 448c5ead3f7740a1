"""Fronts: states of a plan in the making of which none is worse than another in both its times.

A plan is made from either end. From the start, a state is (selection so far, when communication so
far ends); from the end it is (communication from here on, when all would end if nothing had been
before). Both grow by the same rule. With `b` the seconds of backward up to the end of a group, and
the group's own cost in each of the two times:

    first' = first + its cost in the first time
    second' = max(second, b + first') + its cost in the second time

and two states that meet, one from each end, make a plan that finishes at

    max(second + other first, first + other second).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

__all__ = ["Front", "members", "pareto", "pieces"]

Times = Float[np.ndarray, " state"]
Places = Int[np.ndarray, " kept"]


@dataclass(frozen=True, slots=True)
class Front:
    """States by their two times: the first rises, the second falls.

    Attributes:
        first: See above.
        second: See above.
        joined: Whether all mixtures of a state with the one before it count as states, too. That
            makes a bound of what is a plan otherwise.
    """

    first: Float[np.ndarray, " ahead"]
    second: Float[np.ndarray, " ahead"]
    joined: Bool[np.ndarray, " ahead"]

    def finish(self, first: Times, second: Times) -> Times:
        """The earliest that states from the other end can finish with one of these."""
        # That is second + max(their first, wanted + their second). The least of these rises with
        # `wanted` from each state on, until the next one is as good, and is level up to that one.
        # Along mixtures it is straight.
        wanted = first - second
        way, curve = np.empty(2 * self.first.size - 1), np.empty(2 * self.first.size - 1)
        way[::2], curve[::2] = self.first - self.second, self.first
        joined, rise = self.joined[1:], self.first[1:]
        way[1::2] = np.where(joined, way[:-1:2], rise - self.second[:-1])
        curve[1::2] = np.where(joined, curve[:-1:2], rise)
        return second + np.maximum(np.interp(wanted, way, curve), wanted + self.second[-1])


def pareto(first: Times, second: Times) -> Places:
    """Those that no other is as good as in both times, the first time rising."""
    return _best(first, second)[0]


def _best(first: Times, second: Times) -> tuple[Places, Times]:
    """What `pareto` gives, and for each state the least second time of some as good in the first.

    Among these are all that are better in the first, and the state itself.
    """
    order = np.argsort(first)
    falling = second[order]
    least = np.minimum.accumulate(falling)
    kept = np.ones(order.size, bool)
    kept[1:] = falling[1:] < least[:-1]
    found = order[kept]
    reached = np.empty_like(second)
    reached[order] = least
    return found[_last(first[found])], reached


def members(first: Times, second: Times, finish: Times, width: int) -> Places:
    """Of a front at most `width` states, far apart: of neighbours the one to finish first.

    Args:
        first: Rising.
        second: Falling.
        finish: A bound on what can be made of each.
        width: How many may be kept, at least 1.
    """
    across, down = first[-1] - first[0], second[0] - second[-1]
    # Where one stands for another, it is worse by the smaller of the two ways at most.
    way = (first - first[0]) / across if across < down else (second[0] - second) / down
    new = np.ones(first.size, bool)
    for finer in (64, 16, 4, 1):
        cell = np.minimum(way * (finer * width), finer * width - 1).astype(np.int64)
        new[1:] = cell[1:] != cell[:-1]
        if np.count_nonzero(new) <= width:
            break
    heads = np.flatnonzero(new)
    least = np.repeat(np.minimum.reduceat(finish, heads), np.diff(heads, append=first.size))
    return np.maximum.reduceat(np.where(finish == least, np.arange(first.size), -1), heads)


def pieces(
    first: Times, second: Times, joined: Bool[np.ndarray, " state"], width: int
) -> tuple[Front, Places]:
    """A front below all these states and mixtures: the convex hulls of at most `width` parts.

    Where there are no more states than that, and no mixtures, it is they.

    Args:
        first: Rising in each run of states that are joined.
        second: Falling in each run.
        joined: Whether mixtures of a state with the one before it count, too.
        width: How many hulls there may be, at least 1.

    Returns:
        The front, and for each of its states the place of one that it may stand for.
    """
    best, reached = _best(first, second)
    link = np.flatnonzero(joined)
    link = link[reached[link - 1] > second[link]]  # else one state is better than all mixtures
    if not link.size and best.size <= width:
        return Front(first[best], second[best], np.zeros(best.size, bool)), best
    edges = _edges(first[best], second[best], width)
    part = np.searchsorted(edges, first, side="right")
    # Mixtures that reach into several parts are cut at the edges.
    cuts = part[link] - part[link - 1]
    cut = np.repeat(link, cuts)
    edge = np.arange(cut.size) - np.repeat(np.cumsum(cuts) - cuts - part[link - 1], cuts)
    share = (edges[edge] - first[cut - 1]) / (first[cut] - first[cut - 1])
    height = second[cut - 1] + share * (second[cut] - second[cut - 1])
    needed = np.zeros(first.size, bool)
    needed[best] = needed[link] = needed[link - 1] = True
    kept = np.flatnonzero(needed)
    origin = np.concatenate([kept, cut, cut])
    part = np.concatenate([part[kept], edge, edge + 1])
    x = np.concatenate([first[kept], edges[edge], edges[edge]])
    y = np.concatenate([second[kept], height, height])
    order = np.argsort(x)
    order = order[np.argsort(part[order], kind="stable")]  # hardly out of order: fast
    part, x, origin = part[order], x[order], origin[order]
    y = np.minimum.accumulate(y[order])  # who is beaten is as good as who beats it
    new = np.ones(y.size, bool)
    new[1:] = (y[1:] < y[:-1]) | (part[1:] != part[:-1])
    corner = np.flatnonzero(new)
    corner = corner[_last(x[corner]) | _last(part[corner])]
    corner = corner[_hulls(x[corner], y[corner], part[corner])]
    same = np.zeros(corner.size, bool)
    same[1:] = part[corner][1:] == part[corner][:-1]
    return Front(x[corner], y[corner], same), origin[corner]


def _last(value: Shaped[np.ndarray, " state"]) -> Bool[np.ndarray, " state"]:
    """Where the next value is another one."""
    last = np.ones(value.size, bool)
    last[:-1] = value[1:] != value[:-1]
    return last


def _edges(first: Times, second: Times, width: int) -> Float[np.ndarray, " edge"]:
    """Where parts of a front end, in the first time, for all to be as long."""
    way = first - second
    ends = np.linspace(way[0], way[-1], width + 1)[1:-1]
    return np.unique(np.interp(ends, way, first))


def _hulls(x: Times, y: Times, part: Int[np.ndarray, " state"]) -> Places:
    """The corners of the lower convex hull of each part."""
    kept = np.arange(x.size)
    if kept.size > 2:
        x, y = _below_one(x), _below_one(y)
    while kept.size > 2:
        a, b, of = x[kept], y[kept], part[kept]
        # Who is a corner lies below each chord around it: none is taken too many.
        turns = (a[1:-1] - a[:-2]) * (b[2:] - b[:-2]) > (b[1:-1] - b[:-2]) * (a[2:] - a[:-2])
        turns |= of[2:] != of[:-2]
        if turns.all():
            break
        kept = kept[np.concatenate([[True], turns, [True]])]
    return kept


def _below_one(times: Times) -> Times:
    """The same by a power of two, and so the same shape: products of them do not overflow."""
    _, exponent = np.frexp(times.max())
    return np.ldexp(times, -exponent)
