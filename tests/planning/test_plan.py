"""Plans: optimal under the model of time, by proof and beside brute force; and the rules."""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Group,
    Method,
    Plan,
    Profile,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    threshold,
    wfbp,
)

RULES = (single, wfbp, mg_wfbp, omgs_greedy, partial(omgs_greedy, as_published=True))


def affine(name, *, select=(0.0, 0.0), communicate=(0.0, 0.0)):
    costs = [
        AffineCost(alpha_seconds=float(a), beta_seconds_per_byte=float(b))
        for a, b in (select, communicate)
    ]
    return Method(name=name, select_seconds=costs[0], communicate_seconds=costs[1])


COUNTER_EXAMPLE = ([1, 3, 3], [10, 1, 1], affine("sparse", select=(0, 0.1), communicate=(4, 0.5)))


def all_partitions(tensors):
    for bits in range(1 << (tensors - 1)):
        ends = [0, *(i + 1 for i in range(tensors - 1) if bits >> i & 1), tensors]
        yield list(itertools.pairwise(ends))


def finish_of(groups, backward_seconds, sizes):
    """The recurrences of the published timeline, written out; groups as (start, stop, method)."""
    compute = arrived = 0.0
    for start, stop, method in groups:
        elements = sum(sizes[start:stop])
        compute += sum(backward_seconds[start:stop]) + float(method.select_seconds(elements))
        arrived = max(arrived, compute) + float(method.communicate_seconds(elements))
    return arrived


def by_brute_force(backward_seconds, sizes, methods):
    """The least over all partitions; each group by whichever method, by recursion."""
    best = math.inf
    for ranges in all_partitions(len(sizes)):
        states = [(0.0, 0.0)]
        for start, stop in ranges:
            elements, taken = sum(sizes[start:stop]), sum(backward_seconds[start:stop])
            states = [
                (ready, max(arrived, ready) + float(method.communicate_seconds(elements)))
                for compute, arrived in states
                for method in methods
                for ready in [compute + taken + float(method.select_seconds(elements))]
            ]
        best = min(best, *(arrived for _, arrived in states))
    return best


def draw(rng, most_tensors, most_methods):
    tensors = rng.randint(1, most_tensors)
    backward = [rng.choice([0.0, 1e-3, rng.random() * 1e-2]) for _ in range(tensors)]
    sizes = [int(10 ** rng.uniform(0, 6)) for _ in range(tensors)]
    methods = [
        affine(
            f"method {number}",
            select=(rng.choice([0.0, rng.random() * 1e-3]), 10 ** rng.uniform(-10, -7)),
            communicate=(rng.random() * 1e-2, 10 ** rng.uniform(-10, -6)),
        )
        for number in range(rng.randint(1, most_methods))
    ]
    return backward, sizes, methods


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_is_better(seed):
    rng = random.Random(seed)
    for _ in range(25):
        backward, sizes, methods = draw(rng, 6, 3)
        found = plan(backward, sizes, methods, tolerance=0)
        assert found.gap < 1e-12
        assert found.finish_seconds == pytest.approx(
            by_brute_force(backward, sizes, methods), rel=1e-12
        )
    for _ in range(5):
        backward, sizes, methods = draw(rng, 10, 1)
        found = plan(backward, sizes, methods, tolerance=0)
        assert found.finish_seconds == pytest.approx(
            by_brute_force(backward, sizes, methods), rel=1e-12
        )


def test_costs_may_be_any_functions():
    """With jumps, falling with size, and such that take no arrays."""
    rng = random.Random(0)
    for _ in range(20):
        backward, sizes, _ = draw(rng, 6, 1)
        jump = 10 ** rng.uniform(2, 6)
        steps = Method(
            name="steps",
            select_seconds=lambda elements: 1e-3 * math.ceil(elements / 1e5),
            communicate_seconds=lambda elements, jump=jump: 2e-3 if elements < jump else 1e-2,
        )
        falls = Method(
            name="falls",
            select_seconds=lambda _: 0,
            communicate_seconds=lambda elements: 1 / (1 + math.log(elements + 1)),
        )
        found = plan(backward, sizes, [steps, falls], tolerance=0)
        expected = by_brute_force(backward, sizes, [steps, falls])
        assert found.finish_seconds == pytest.approx(expected, rel=1e-12)


def test_the_published_rule_is_not_optimal():
    """The known counter-example: it merges all, which holds up the one large tensor."""
    greedy = omgs_greedy(*COUNTER_EXAMPLE)
    assert greedy.finish_seconds == pytest.approx(18.2)
    assert [(g.start, g.stop) for g in greedy.groups] == [(0, 3)]
    backward, sizes, method = COUNTER_EXAMPLE
    best = plan(backward, sizes, [method])
    assert best.finish_seconds == pytest.approx(16.0)
    assert [(g.start, g.stop) for g in best.groups] == [(0, 1), (1, 3)]
    assert best.gap <= 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_never_above_the_rules(seed):
    rng = random.Random(100 + seed)
    for _ in range(20):
        backward, sizes, methods = draw(rng, 40, 3)
        found = plan(backward, sizes, methods)
        assert found.gap <= 1e-4
        for rule in RULES:
            for method in methods:
                assert found.finish_seconds <= rule(backward, sizes, method).finish_seconds


def test_a_plan_says_what_its_groups_take():
    rng = random.Random(5)
    for _ in range(20):
        backward, sizes, methods = draw(rng, 30, 3)
        by_name = {method.name: method for method in methods}
        found = plan(backward, sizes, methods)
        groups = [(g.start, g.stop, by_name[g.method]) for g in found.groups]
        assert found.finish_seconds == pytest.approx(finish_of(groups, backward, sizes))
        spans = found.timeline(backward, sizes, methods)
        ends = max((span.end_seconds for span in spans), default=0.0)
        assert ends == pytest.approx(found.finish_seconds, abs=1e-15)
        on_wire = [(s.start_seconds, s.end_seconds) for s in spans if s.what == "communicate"]
        assert all(a[1] <= b[0] + 1e-15 for a, b in itertools.pairwise(on_wire))


def resnet50(world_size, alpha, beta):
    """On links with the constants that the authors typed in; P102 selection."""
    profile = Profile.load("resnet50").scaled(time=1.0)
    selecting = Method(
        name="sparse",
        select_seconds=lambda n: 2.18896957e-10 * n * np.log2(np.maximum(n, 1)),
        communicate_seconds=lambda n: 2 * (alpha + beta * 4 * world_size * 0.001 * n),
    )
    total = sum(profile.backward_seconds)
    return [0.12 * s / total for s in profile.backward_seconds], profile.elements, selecting


def test_a_network_of_161_tensors_gains_what_the_paper_leaves():
    """On gigabit links of 16 the greedy rule merges all 161; several groups are far better."""
    backward, sizes, method = resnet50(16, 1.1e-2, 1.7e-8)
    greedy = omgs_greedy(backward, sizes, method, as_published=True)
    assert len(greedy.groups) == 1
    best = plan(backward, sizes, [method])
    assert 4 <= len(best.groups) <= 16
    assert best.gap <= 1e-4
    assert 1.15 < greedy.finish_seconds / best.finish_seconds < 1.4
    assert wfbp(backward, sizes, method).finish_seconds > 10 * best.finish_seconds


def test_dense_and_sparse_groups_stand_in_one_plan():
    """Where the wire is fast for small tensors, selecting from them costs more than it saves."""
    dense = affine("dense", communicate=(0.001, 4e-8))
    sparse = affine("sparse", select=(0.01, 1e-10), communicate=(0.001, 4e-11))
    sizes = [1000, 10_000_000, 1000, 10_000_000]
    found = plan([0.05] * 4, sizes, [dense, sparse])
    assert {group.method for group in found.groups} == {"dense", "sparse"}


def test_the_published_code_binds_the_first_two():
    backward, sizes, method = [1.0, 100.0, 1.0], [1000, 1, 1], affine("sparse", communicate=(1, 0))
    assert omgs_greedy(backward, sizes, method).groups[0].stop == 1
    assert omgs_greedy(backward, sizes, method, as_published=True).groups[0].stop == 2


def test_mg_wfbp_merges_what_would_wait():
    """The second gradient comes while the first would still wait or has just begun to travel."""
    method = affine("dense", communicate=(1.0, 1e-3))
    assert [g.stop for g in mg_wfbp([1, 0.5, 5], [10, 10, 10], method).groups] == [2, 3]


def test_a_threshold_fills_groups_by_bytes():
    sizes = [100, 100, 100, 1000, 50]
    method = affine("dense")
    stops = [g.stop for g in threshold([0] * 5, sizes, method, size_bytes=800).groups]
    assert stops == [2, 4, 5]
    first = threshold([0] * 5, sizes, method, size_bytes=800, first_size_bytes=400)
    assert [g.stop for g in first.groups] == [1, 3, 4, 5]
    with pytest.raises(ValueError, match="size_bytes is 0"):
        threshold([0], [1], method, size_bytes=0)


METHOD = affine("sparse", communicate=(1, 1))


@pytest.mark.parametrize(
    ("backward", "sizes", "methods", "reason"),
    [
        ([], [], [METHOD], "0 times and 0 sizes"),
        ([1], [1, 2], [METHOD], "1 times and 2 sizes"),
        ([-1], [1], [METHOD], "takes -1 seconds"),
        ([math.nan], [1], [METHOD], "takes nan seconds"),
        ([1], [0], [METHOD], "has 0 elements"),
        ([1], [1], [], "there is no method"),
        ([1], [1], [METHOD, METHOD], "two methods are called 'sparse'"),
        (
            [1],
            [1],
            [Method(name="x", select_seconds=lambda n: -n, communicate_seconds=float)],
            "-1",
        ),
        (
            [1],
            [1],
            [Method(name="x", select_seconds=float, communicate_seconds=lambda _: math.nan)],
            "nan",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(backward, sizes, methods, reason):
    with pytest.raises(ValueError, match=reason):
        plan(backward, sizes, methods)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(ValueError, match="tolerance is"):
        plan([1], [1], [METHOD], tolerance=tolerance)


def test_plans_go_through_json():
    found = plan(*COUNTER_EXAMPLE[:2], [COUNTER_EXAMPLE[2]])
    assert Plan.from_json(found.to_json()) == found
    for key, value, reason in (
        ("format", "x", "not a plan"),
        ("version", 0, "version 0"),
        ("groups", [[0, 1]], "list of"),
        ("groups", [[1, 2, "x"]], "must begin at 0"),
        ("finish_seconds", "1", "is '1'"),
        ("lower_bound_seconds", 1e9, "is above"),
        ("more", 1, "unknown"),
    ):
        with pytest.raises(ValueError, match=reason):
            Plan.from_json({**found.to_json(), key: value})


def test_a_plan_for_other_tensors_has_no_timeline():
    held = Plan(groups=(Group(0, 2, "sparse"),), finish_seconds=1, lower_bound_seconds=1)
    with pytest.raises(ValueError, match="plan for 2 tensors was given 1"):
        held.timeline([1], [1], [METHOD])
    with pytest.raises(ValueError, match="travels by 'sparse'"):
        held.timeline([1, 1], [1, 1], [affine("dense")])
