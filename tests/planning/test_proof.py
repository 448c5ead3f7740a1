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
    dense_all_reduce,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    sparse_all_gather,
    wfbp,
)
from gossipgrad.planning import _optimal as optimal
from gossipgrad.planning._ranges import all_choices
from gossipgrad.planning._sweep import Keep, knowing_nothing, sweep
from gossipgrad.planning._timeline import take_arrays

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


def drawn(draw):
    """A step in which selecting less takes sending more, at any rate: fronts are long."""
    tensors = draw.randint(2, 14)
    backward = [draw.choice((0, 0, 1, 5, draw.uniform(0, 20))) for _ in range(tensors)]
    sizes = [draw.choice((1, 2, 3, 10, 40)) for _ in range(tensors)]

    def cost():
        constant, rate = draw.uniform(0, 3), draw.choice((0.1, 1, draw.uniform(0, 3)))
        jumps = [draw.choice((0, 0, 1, 7)) for _ in range(7)]
        return lambda n: constant + rate * n + jumps[n % 7]

    return backward, sizes, [Method(name, cost(), cost()) for name in "abc"]


def best_plan_survives(draw):
    """Whether it gets by in passes that know when it finishes, and leave out nearly all else."""
    backward, sizes, methods = drawn(draw)
    least = least_by_fronts(backward, sizes, methods)
    choices, _ = all_choices(sizes, methods)
    reached = np.array([0.0, *itertools.accumulate(backward)])
    ahead = {forward: knowing_nothing(len(sizes)) for forward in (False, True)}
    forward, hulls = draw.random() < 0.5, draw.random() < 0.85
    for width in (1, 1, 1, 1, 2, 2, 3, 4, 8):
        swept = sweep(
            choices,
            reached,
            ahead[not forward],
            forward=forward,
            keep=Keep.PIECES if hulls else Keep.MEMBERS,
            width=width,
            below=least * (1 + draw.choice((1e-9, 1e-9, 1e-2))),
            patience=10**9,
            hard_below=0.0,
            most=10**9,
        )
        if swept.bounds:
            ahead[forward] = swept.fronts
            choices = choices.only(swept.useful)
            if swept.finish_seconds > least * (1 + 1e-12):
                return False
        forward, hulls = not forward, draw.random() < 0.85
    return True


@pytest.mark.parametrize("seed", [0, 1, 10, 38, 57])
def test_no_pass_loses_the_best_plan(seed):
    draw = random.Random(seed)
    assert all(best_plan_survives(draw) for _ in range(10))


@pytest.mark.parametrize("tensors", [1, 127, 128, 129, 255, 256])
def test_all_groups_are_there(tensors):
    choices, _ = all_choices([1] * tensors, [Method("any", lambda n: 0, lambda n: 1)])
    pairs = set(zip(choices.start.tolist(), choices.stop.tolist(), strict=True))
    assert pairs == set(itertools.combinations(range(tensors + 1), 2))


def test_groups_that_are_missing_are_no_proof(monkeypatch):
    def some(*given):
        choices, asked = all_choices(*given)
        return choices.only(choices.stop < 8), asked

    monkeypatch.setattr(optimal, "all_choices", some)
    with pytest.raises(AssertionError, match="no pass to the other end"):
        plan([1] * 8, [1] * 8, [Method("any", lambda n: 0, lambda n: 1)])


class Counted:
    """A cost that keeps what it was asked for."""

    def __init__(self, takes_arrays, give):
        self.takes_arrays = takes_arrays
        self.give = give
        self.asked = []

    def __call__(self, elements):
        self.asked.append(elements)
        return self.give(elements)


def test_costs_are_asked_for_arrays_only_where_they_take_them():
    backward, sizes = [1.0] * 40, [1] * 40
    one_by_one = Counted(False, lambda n: 3 + 0.01 * n)
    truth = plan(backward, sizes, [Method("any", lambda n: 0.0, one_by_one)], tolerance=0)
    assert {type(n) for n in one_by_one.asked} == {int}
    assert one_by_one.asked[:40] == list(range(1, 41))
    assert len(one_by_one.asked) == 40 + len(truth.groups)  # what the plan takes in the end
    at_once = Counted(True, lambda n: 3 + 0.01 * n)
    assert plan(backward, sizes, [Method("any", lambda n: 0.0, at_once)], tolerance=0) == truth
    assert len(at_once.asked) == 1 + len(truth.groups)
    assert at_once.asked[0].dtype == np.float64
    # One that says so and gives no array is asked one by one.
    constant = Counted(True, lambda n: 3.0)
    assert plan(backward, sizes, [Method("any", lambda n: 0.0, constant)]).gap == 0


def test_methods_take_arrays_where_all_that_they_are_made_of_do():
    wire = AffineCost(alpha_seconds=2.0, beta_seconds_per_byte=0.5)
    for of, taken in ((wire, True), (lambda n: 1.0, False)):
        for method in (
            dense_all_reduce(of),
            dense_all_reduce(wire, cast=of),
            sparse_all_gather(of, density=0.1, world_size=2, select=wire),
            sparse_all_gather(wire, density=0.1, world_size=2, select=wire, scatter=of),
        ):
            assert take_arrays(method.communicate_seconds) == taken


def test_a_cost_that_is_another_each_time_breaks_nothing():
    draw = random.Random(0)
    for tensors in (5, 40):
        method = Method("noise", lambda n: 0, lambda n: draw.uniform(1, 2))
        assert plan([1.0] * tensors, [1] * tensors, [method]).groups[-1].stop == tensors


def some_work():
    """Two currencies that can be exchanged for each other at one rate: many plans are as good."""
    draw = random.Random(0)
    backward = [draw.uniform(0, 5) for _ in range(40)]
    sizes = [draw.randint(1, 1000) for _ in backward]
    methods = [
        Method("a", AffineCost(0.1, 0.01), AffineCost(1.0, 0.02)),
        Method("b", AffineCost(0.2, 0.02), AffineCost(1.0, 0.01)),
    ]
    return backward, sizes, methods


def passes_of_hulls():
    """Without those of so many states that they are proof by themselves."""
    yield True, Keep.BEST, 1
    yield False, Keep.MEMBERS, 4
    yield False, Keep.PIECES, 1
    yield True, Keep.MEMBERS, 8
    for place in range(10):
        yield place % 2 == 0, Keep.PIECES, 4 << place


def many_alike():
    """Tensors of four sizes: which of them are compressed hardly matters, how many does."""
    draw = random.Random(3)
    sizes = [draw.choice((768, 786_432, 1_769_472, 2_359_296)) for _ in range(60)]
    wire = AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=5e-5)
    cast, pick = AffineCost(0.0, 5e-10), AffineCost(1e-4, 2e-9)
    methods = [
        dense_all_reduce(wire.ring_all_reduce(16), element_bytes=2, cast=cast),
        sparse_all_gather(wire.ring_all_gather(16), density=0.001, world_size=16, select=pick),
    ]
    return [1e-9 * size for size in sizes], sizes, methods


@pytest.mark.parametrize("step", [some_work, many_alike])
def test_where_all_states_could_be_kept_they_prove_as_much_as_hulls(monkeypatch, step):
    passes = []

    def noted(*args, **kwargs):
        swept = sweep(*args, **kwargs)
        passes.append((kwargs["keep"], swept.bounds))
        return swept

    monkeypatch.setattr(optimal, "sweep", noted)
    found = plan(*step(), tolerance=0)
    assert found.gap <= 1e-12
    assert (Keep.MEMBERS, False) in passes
    assert passes[-1] == (Keep.MEMBERS, True)
    monkeypatch.setattr(optimal, "_passes", passes_of_hulls)
    by_hulls = plan(*step(), tolerance=0)
    assert by_hulls.gap <= 1e-12
    assert by_hulls.finish_seconds == pytest.approx(found.finish_seconds, rel=1e-12)


def test_too_much_work_is_given_up_with_an_honest_gap(monkeypatch):
    backward, sizes, methods = some_work()
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


def test_patience_may_end_within_a_pass(monkeypatch):
    """Then the tolerance spares work from there on, and what is proved holds."""
    made = []
    monkeypatch.setattr(optimal, "_passes", passes_of_hulls)

    def counted(*args, **kwargs):
        swept = sweep(*args, **kwargs)
        made.append(swept.made)
        return swept

    def found(patience):
        monkeypatch.setattr(optimal, "_PATIENCE", patience)
        made.clear()
        return plan(*some_work()), list(made)

    monkeypatch.setattr(optimal, "sweep", counted)
    best, exact = found(1_000_000)
    assert best.gap <= 1e-12
    begun = sum(exact[:4])
    for patience in (begun, begun + exact[4] // 20):
        near, passes = found(patience)
        assert passes[:4] == exact[:4]
        assert passes[4] < exact[4]
        assert near.gap <= 1e-4 * (1 + 1e-9)
        assert near.lower_bound_seconds <= best.finish_seconds <= near.finish_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", [2900, 4534])
def test_what_the_tolerance_spared_in_one_pass_is_proved_by_no_later_one(monkeypatch, seed):
    """Though all that is left by then could be kept."""
    monkeypatch.setattr(optimal, "_PATIENCE", -1)
    step = drawn(random.Random(seed))
    least, found = least_by_fronts(*step), plan(*step, tolerance=0.05)
    assert found.finish_seconds > least * (1 + 1e-6), "the tolerance spares something here"
    assert found.lower_bound_seconds <= least * (1 + 1e-12)
    assert found.gap <= 0.05 * (1 + 1e-9)


def test_arguments_by_position():
    method = Method("dense", AffineCost(0.0, 0.0), AffineCost(1.0, 0.5))
    assert method == Method(
        name="dense",
        select_seconds=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0),
        communicate_seconds=AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.5),
    )
    assert plan([1], [2], [method]).groups == (Group(0, 1, "dense"),)
