"""What `plan` calls proved is so: around the ends of narrow types, and of costs that mislead."""

import itertools
import math
import random

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Group,
    Method,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    wfbp,
)
from gossipgrad.planning import _optimal as optimal
from gossipgrad.planning._ranges import all_choices

RULES = (single, wfbp, mg_wfbp, omgs_greedy)


def least_by_fronts(backward, sizes, methods):
    """When the best plan has finished, by all that is not worse in selection and communication."""
    reached = [0, *itertools.accumulate(backward)]
    held = [0, *itertools.accumulate(sizes)]
    fronts = [[(0, 0)]]
    for stop in range(1, len(sizes) + 1):
        made = {}
        for start in range(stop):
            for method in methods:
                elements = held[stop] - held[start]
                select = method.select_seconds(elements)
                takes = method.communicate_seconds(elements)
                for selected, arrived in fronts[start]:
                    at = selected + select
                    finish = max(arrived, reached[stop] + at) + takes
                    made[at] = min(finish, made.get(at, math.inf))
        front = []
        for state in sorted(made.items()):
            if not front or state[1] < front[-1][1]:
                front.append(state)
        fronts.append(front)
    return fronts[-1][-1][1]


def for_some(name, rests):
    """A method that is cheap for numbers of elements with these rests over seven."""
    return Method(name, lambda n: n % 7 % 2, lambda n: n + (0 if n % 7 in rests else 9))


@pytest.mark.parametrize("tensors", [127, 128, 129])
def test_as_many_tensors_as_a_narrow_type_ends_at(tensors):
    """With numbers as small as these fronts are small, too, and an exact plan is no work."""
    draw = random.Random(tensors)
    backward = [draw.choice((0, 1, 2)) for _ in range(tensors)]
    sizes = [draw.choice((1, 2, 3)) for _ in range(tensors)]
    methods = [for_some("one", (1, 2, 5)), for_some("two", (0, 3, 6))]
    found = plan(backward, sizes, methods, tolerance=0)
    assert found.finish_seconds == least_by_fronts(backward, sizes, methods)
    assert found.gap <= 1e-12
    assert {group.method for group in found.groups} == {"one", "two"}
    for rule, method in itertools.product(RULES, methods):
        assert found.finish_seconds < rule(backward, sizes, method).finish_seconds


@pytest.mark.parametrize("tensors", [1, 127, 128, 129, 255, 256])
def test_all_groups_are_there(tensors):
    choices = all_choices([1] * tensors, [Method("any", lambda n: 0, lambda n: 1)])
    pairs = set(zip(choices.start.tolist(), choices.stop.tolist(), strict=True))
    assert pairs == set(itertools.combinations(range(tensors + 1), 2))


def test_groups_that_are_missing_are_no_proof(monkeypatch):
    def some(*given):
        choices = all_choices(*given)
        return choices.only(choices.stop < 8)

    monkeypatch.setattr(optimal, "all_choices", some)
    with pytest.raises(AssertionError, match="no pass to the other end"):
        plan([1] * 8, [1] * 8, [Method("any", lambda n: 0, lambda n: 1)])


def misleading(wrong, place):
    """A cost that is another in an array of sizes, at one size."""

    def cost(elements):
        right = 3 + 0.01 * elements
        if np.ndim(elements):
            return np.where(elements == place, wrong, right)
        return right

    return cost


def test_groups_of_a_plan_cost_what_each_costs_by_itself():
    backward, sizes = [1.0] * 40, [1] * 40
    right = Method("any", lambda n: 0.0, lambda n: 3 + 0.01 * n)
    truth = plan(backward, sizes, [right], tolerance=0)
    for place in {group.stop - group.start for group in truth.groups} | {7, 23}:
        free = Method("any", lambda n: 0.0, misleading(0.0, place))
        assert plan(backward, sizes, [free], tolerance=0) == truth


def test_groups_of_a_plan_by_a_rule_cost_what_each_costs_by_itself():
    """Each tensor alone is best here, and looks dear."""
    backward, sizes = [10.0] * 40, [1] + [3] * 39
    dear = Method("any", lambda n: 0.0, misleading(50.0, 3))
    found = plan(backward, sizes, [dear], tolerance=0)
    assert found.finish_seconds == wfbp(backward, sizes, dear).finish_seconds == 403.03
    assert found.gap == 0


def test_a_cost_that_is_another_each_time_is_refused():
    draw = random.Random(0)
    method = Method("noise", lambda n: 0, lambda n: draw.uniform(1, 2))
    with pytest.raises(ValueError, match="gives other seconds when it is asked for the same"):
        plan([1.0] * 5, [1] * 5, [method])


def test_too_much_work_is_given_up_with_an_honest_gap(monkeypatch):
    """Two currencies that can be exchanged for each other at one rate: many plans are as good."""
    draw = random.Random(0)
    backward = [draw.uniform(0, 5) for _ in range(40)]
    sizes = [draw.randint(1, 1000) for _ in backward]
    methods = [
        Method("a", AffineCost(0.1, 0.01), AffineCost(1.0, 0.02)),
        Method("b", AffineCost(0.2, 0.02), AffineCost(1.0, 0.01)),
    ]
    best = plan(backward, sizes, methods)
    assert plan(backward, sizes, methods) == best
    gaps = []
    for enough in (10, 3_000, 30_000):
        monkeypatch.setattr(optimal, "_ENOUGH", enough)
        found = plan(backward, sizes, methods)
        gaps.append(found.gap)
        assert found.lower_bound_seconds <= best.finish_seconds * (1 + 1e-12)
        assert found.lower_bound_seconds >= sum(backward) * (1 - 1e-12)
        assert found.finish_seconds >= best.lower_bound_seconds * (1 - 1e-12)
        for rule, method in itertools.product(RULES, methods):
            assert found.finish_seconds <= rule(backward, sizes, method).finish_seconds
    gaps.append(best.gap)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1e-2
    assert gaps[-1] <= 1e-4 * (1 + 1e-9)


def test_arguments_by_position():
    method = Method("dense", AffineCost(0.0, 0.0), AffineCost(1.0, 0.5))
    assert method == Method(
        name="dense",
        select_seconds=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0),
        communicate_seconds=AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.5),
    )
    assert plan([1], [2], [method]).groups == (Group(0, 1, "dense"),)
