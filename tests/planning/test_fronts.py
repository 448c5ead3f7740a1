"""Fronts bound what can be made of their states, and of their mixtures."""

import random

import numpy as np
import pytest

from gossipgrad.planning._fronts import Front, members, pareto, pieces


def drawn_runs(seed):
    """Runs of states, each rising in the first time and falling in the second, some joined."""
    draw = random.Random(seed)
    first, second, joined = [], [], []
    for _ in range(draw.randint(1, 5)):
        length = draw.randint(1, 6)
        first += sorted(draw.sample(range(40), length))
        second += sorted(draw.sample(range(40), length), reverse=True)
        joined += [False, *(draw.random() < 0.5 for _ in range(length - 1))]
    return np.array(first, float), np.array(second, float), np.array(joined)


def with_mixtures(first, second, joined):
    """The states, and a few of the mixtures between those that are joined."""
    found = list(zip(first, second, strict=True))
    for at in np.flatnonzero(joined):
        for share in (0.2, 0.5, 0.8):
            x, y = (share * t[at - 1] + (1 - share) * t[at] for t in (first, second))
            found.append((x, y))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_pieces_bound_what_they_stand_for(seed):
    first, second, joined = drawn_runs(seed)
    every = with_mixtures(first, second, joined)
    bounds = []
    ours, theirs = (np.arange(0.0, 60, 3.0) for _ in range(2))
    ours, theirs = (grid.ravel() for grid in np.meshgrid(ours, theirs))
    exact = np.min([np.maximum(theirs + one, ours + other) for one, other in every], axis=0)
    for width in (1, 2, 4, 64):
        front, origin = pieces(first, second, joined, width)
        assert (np.diff(front.first) >= 0).all()
        assert (np.diff(front.second) <= 0).all()
        assert origin.size == front.first.size
        bounds.append(front.finish(ours, theirs))
        assert (bounds[-1] <= exact + 1e-9).all()
    assert (bounds[0] <= bounds[2] + 1e-9).all()
    if not joined.any():
        assert not front.joined.any()
        np.testing.assert_allclose(bounds[-1], exact)


@pytest.mark.parametrize("scale", [2.0**1010, 2.0**-900])
def test_units_of_time_do_not_matter(scale):
    """Though products of such times are no longer numbers."""
    corners = 0
    for seed in range(40):
        first, second, joined = drawn_runs(seed)
        for width in (1, 2, 4):
            plain, origin = pieces(first, second, joined, width)
            scaled, same = pieces(scale * first, scale * second, joined, width)
            assert same.tolist() == origin.tolist()
            assert (scaled.first / scale).tolist() == plain.first.tolist()
            assert (scaled.second / scale).tolist() == plain.second.tolist()
            corners = max(corners, plain.first.size)
    assert corners > 3


def test_what_is_beaten_is_left_out():
    first, second = np.array([3.0, 1.0, 2.0, 1.0]), np.array([1.0, 4.0, 4.0, 5.0])
    assert pareto(first, second).tolist() == [1, 0]


def test_members_are_spread_and_the_best_of_their_neighbours():
    first = np.array([0.0, 0.1, 5.0, 9.9, 10.0])
    second = np.array([20.0, 19.0, 10.0, 1.0, 0.0])
    finish = np.array([3.0, 2.0, 5.0, 1.0, 4.0])
    assert members(first, second, finish, 3).tolist() == [1, 2, 3]
    assert members(first, second, finish, 1).tolist() == [3]


def test_a_mixture_finishes_between_its_ends():
    ends = Front(np.array([0.0, 4.0]), np.array([4.0, 0.0]), np.array([False, True]))
    apart = Front(ends.first, ends.second, np.array([False, False]))
    nothing = np.zeros(1)
    assert apart.finish(nothing, nothing).tolist() == [4.0]
    assert ends.finish(nothing, nothing).tolist() == [2.0]
