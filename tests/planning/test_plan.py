"""Plans: the optimal one against all there are; methods, timelines and files of plans."""

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Merge,
    Method,
    Plan,
    Profile,
    _optimal,
    dense_all_reduce,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    sparse_all_gather,
    wfbp,
)

RULES = (
    single,
    wfbp,
    mg_wfbp,
    omgs_greedy,
    lambda *step: omgs_greedy(*step, as_published=True),
)
COUNTER = (
    (1, 3, 3),
    (10, 1, 1),
    Method(
        name="sparse",
        select_seconds=lambda elements: 0.1 * elements,
        communicate_seconds=lambda elements: 4 + 0.5 * elements,
    ),
)
WIRE = AffineCost(alpha_seconds=2.0, beta_seconds_per_byte=0.5)
SELECT = AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.125)


def affine(name, select, communicate):
    def cost(start_up, rate):
        return AffineCost(alpha_seconds=start_up, beta_seconds_per_byte=rate)

    return Method(name=name, select_seconds=cost(*select), communicate_seconds=cost(*communicate))


FREE = affine("free", (0.0, 0.0), (0.0, 0.0))


def jumping(draw):
    """A cost that has nothing to do with size."""
    values = np.array([draw.choice((0, 1, 2, 5)) for _ in range(7)])
    return lambda elements: values[np.asarray(elements, np.int64) % 7]


def case(seed, tensors):
    draw = random.Random(seed)
    backward = [draw.choice((0, 1, 2, 3, 0.5)) for _ in range(tensors)]
    sizes = [draw.choice((1, 1, 2, 10, 40)) for _ in range(tensors)]
    methods = [
        affine("one", (draw.uniform(0, 1), 0.1), (draw.uniform(0, 5), draw.uniform(0, 0.5))),
        affine("two", (0.0, 0.0), (draw.uniform(0, 2), draw.uniform(0, 1))),
        Method(name="three", select_seconds=jumping(draw), communicate_seconds=jumping(draw)),
    ]
    return backward, sizes, draw.sample(methods, draw.choice((1, 2, 3)))


def finish_of(groups, backward, sizes, methods):
    """The recurrences of the paper, forward in time."""
    known = {method.name: method for method in methods}
    computing = sending = 0.0
    for start, stop, name in groups:
        elements = sum(sizes[start:stop])
        computing += sum(backward[start:stop]) + known[name].select_seconds(elements)
        sending = max(sending, computing) + known[name].communicate_seconds(elements)
    return sending


def least_of_all(backward, sizes, methods):
    least = math.inf
    inner = range(1, len(sizes))
    for count in range(len(sizes)):
        for cuts in itertools.combinations(inner, count):
            ends = list(itertools.pairwise((0, *cuts, len(sizes))))
            for names in itertools.product([method.name for method in methods], repeat=len(ends)):
                groups = [(*end, name) for end, name in zip(ends, names, strict=True)]
                least = min(least, finish_of(groups, backward, sizes, methods))
    return least


@pytest.mark.parametrize("seed", range(60))
def test_none_of_all_plans_finishes_earlier(seed):
    backward, sizes, methods = case(seed, tensors=1 + seed % 6)
    found = plan(backward, sizes, methods)
    assert found.finish_seconds == pytest.approx(least_of_all(backward, sizes, methods), rel=1e-12)
    assert found.gap <= 1e-12
    assert found.groups[-1].stop == len(sizes)
    groups = [(group.start, group.stop, group.method) for group in found.groups]
    assert finish_of(groups, backward, sizes, methods) == pytest.approx(found.finish_seconds)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_proved_holds_where_fronts_are_cut(seed, monkeypatch):
    monkeypatch.setattr(_optimal, "_WIDTHS", (1, 2))  # a front of 256 is cut in no small case
    backward, sizes, methods = case(seed, tensors=6)
    least = least_of_all(backward, sizes, methods)
    found = plan(backward, sizes, methods)
    assert found.lower_bound_seconds <= least * (1 + 1e-12)
    assert least <= found.finish_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_never_above_a_published_rule(seed):
    backward, sizes, methods = case(seed, tensors=40)
    found = plan(backward, sizes, methods)
    for method, rule in itertools.product(methods, RULES):
        other = rule(backward, sizes, method)
        assert found.finish_seconds <= other.finish_seconds
        assert found.lower_bound_seconds <= other.finish_seconds * (1 + 1e-12)


def test_the_counter_example_to_the_published_rule():
    backward, sizes, method = COUNTER
    found = plan(backward, sizes, [method])
    assert [(group.start, group.stop) for group in found.groups] == [(0, 1), (1, 3)]
    assert (found.finish_seconds, found.gap) == (pytest.approx(16.0), 0)
    for published in (True, False):
        greedy = omgs_greedy(backward, sizes, method, as_published=published)
        assert greedy.groups == (Merge(0, 3, "sparse"),)
        assert greedy.finish_seconds == pytest.approx(18.2)


def test_each_group_takes_the_method_that_suits_it():
    """A large tensor pays for selection, small ones do not; of equal methods the first is taken."""
    sparse = affine("sparse", (1.0, 0.0), (1.0, 0.01))
    dense = affine("dense", (0.0, 0.0), (0.5, 1.0))
    found = plan([1, 1, 50, 1], [1, 100, 1, 1], [dense, sparse])
    by_tensor = {
        tensor: group.method for group in found.groups for tensor in range(group.start, group.stop)
    }
    assert (by_tensor[1], by_tensor[3]) == ("sparse", "dense")
    again = replace(dense, name="again")
    assert plan([1], [1], [again, dense]).groups == (Merge(0, 1, "again"),)


def test_the_timeline_is_what_finish_seconds_says():
    backward, sizes, methods = case(3, tensors=12)
    found = plan(backward, sizes, methods)
    spans = found.timeline(backward, sizes, methods)
    assert spans[-1].end_seconds == found.finish_seconds
    assert all(span.end_seconds > span.start_seconds for span in spans)
    for lane in (("backward", "select"), ("communicate",)):
        ours = [span for span in spans if span.what in lane]
        for before, after in itertools.pairwise(ours):
            assert before.end_seconds <= after.start_seconds + 1e-12
    sends = {span.group: span.start_seconds for span in spans if span.what == "communicate"}
    for span in spans:
        if span.what != "communicate":
            assert sends.get(span.group, math.inf) >= span.end_seconds - 1e-12
    backward, sizes, method = COUNTER
    late = plan(backward, sizes, [method]).timeline([2, 6, 6], sizes, [method])
    assert late[-1].end_seconds == pytest.approx(14 + 1.2 + 5)


def test_many_tensors_lose_little(unchecked_types):
    """A network's sizes, with links on which some groups are better sent whole."""
    profile = Profile.load("resnet50")
    hop = AffineCost.from_rate(rate_bits_per_second=1e9, latency_seconds=50e-6)
    methods = [
        dense_all_reduce(hop.ring_all_reduce(4)),
        dense_all_reduce(hop.ring_all_reduce(4), name="fp16", element_bytes=2),
        sparse_all_gather(
            hop.ring_all_gather(4),
            density=0.001,
            world_size=4,
            select=AffineCost(alpha_seconds=1e-4, beta_seconds_per_byte=2e-9),
        ),
    ]
    assert len(profile.elements) == 161
    assert plan(profile.backward_seconds, profile.elements, methods).gap < 1e-3


def test_json_and_back():
    backward, sizes, methods = case(5, tensors=9)
    found = plan(backward, sizes, methods)
    named = replace(found, names=tuple("abcdefghi"))
    for each in (found, named):
        assert Plan.from_json(json.loads(json.dumps(each.to_json()))) == each
    held = found.to_json()
    whole = {"groups": [[0, 1, "a"]], "finish_seconds": 2, "lower_bound_seconds": 1}
    assert Plan.from_json(held | whole).gap == 1
    assert Plan.from_json(held | whole | {"lower_bound_seconds": 0}).gap == math.inf
    assert plan([0, 0], [1, 1], [FREE]).gap == 0
    for change in (
        {"format": "gossipgrad profile"},
        {"version": 2},
        {"more": 1},
        {"groups": []},
        {"groups": [[0, 1]]},
        {"groups": [[1, 2, "a"]]},
        {"groups": [[0, 1, "a"], [2, 3, "a"]]},
        {"groups": [[0, 0, "a"]]},
        {"groups": [[0, 1, ""]]},
        {"finish_seconds": math.nan},
        {"finish_seconds": "soon"},
        {"lower_bound_seconds": -1.0},
        {"lower_bound_seconds": 1e9},
        {"names": list("abcdefgh")},
        {"names": list("abcdefgha")},
    ):
        with pytest.raises(ValueError, match=r"plan|group|names|finish_seconds"):
            Plan.from_json(held | change)
    for other in ([], None, {key: held[key] for key in ("format", "version")}):
        with pytest.raises(ValueError, match="plan"):
            Plan.from_json(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan([1], [1], []),
        lambda: plan([1], [1], [FREE, FREE]),
        lambda: plan([1], [1], FREE),
        lambda: single([1], [1], [FREE]),
        lambda: affine("", (0.0, 0.0), (1.0, 0.0)),
        lambda: plan([1], [1], [FREE]).timeline([1, 1], [1, 1], [FREE]),
        lambda: plan([1], [1], [FREE]).timeline([1], [1], [replace(FREE, name="other")]),
        lambda: dense_all_reduce(WIRE, element_bytes=0),
        lambda: dense_all_reduce(None),
        lambda: dense_all_reduce(WIRE, cast="fp16"),
        lambda: sparse_all_gather(WIRE, density=0.0, world_size=2, select=SELECT),
        lambda: sparse_all_gather(WIRE, density=1.5, world_size=2, select=SELECT),
        lambda: sparse_all_gather(WIRE, density=0.1, world_size=0, select=SELECT),
        lambda: sparse_all_gather(WIRE, density=0.1, world_size=1, select=SELECT, pair_bytes=0),
        lambda: sparse_all_gather(WIRE, density=0.1, world_size=1, select=None),
    ],
)
def test_what_is_no_method_or_plan(make, unchecked_types):
    with pytest.raises(ValueError, match=r"method|plan|element|density|world|pair_bytes|function"):
        make()


@pytest.mark.parametrize(
    "bad",
    [
        lambda n: -1.0,
        lambda n: n * math.nan,
        lambda n: "soon",
        lambda n: None,
        lambda n: 2.0 if n > 20 else 1.0,  # has no truth for an array
        lambda n: n.bit_length(),
    ],
)
def test_costs_that_are_no_time(bad):
    method = Method(name="bad", select_seconds=lambda n: 0, communicate_seconds=bad)
    with pytest.raises(ValueError, match="communicate_seconds of method 'bad'"):
        plan([1.0] * 20, [1] * 20, [method])
