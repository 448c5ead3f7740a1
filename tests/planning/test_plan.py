"""Plans: the optimal one against all there are, the published rules against their letters."""

import itertools
import json
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Merge,
    Method,
    PiecewiseCost,
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


def affine(name, select, communicate):
    def cost(start_up, rate):
        return AffineCost(alpha_seconds=start_up, beta_seconds_per_byte=rate)

    return Method(name=name, select_seconds=cost(*select), communicate_seconds=cost(*communicate))


def jumping(draw):
    """A cost that has nothing to do with size."""
    values = [draw.choice((0, 1, 2, 5)) for _ in range(7)]
    return lambda elements: values[elements % 7]


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
    least = least_of_all(backward, sizes, methods)
    assert found.finish_seconds == pytest.approx(least, rel=1e-12)
    assert found.gap <= 1e-12
    assert found.groups[-1].stop == len(sizes)
    groups = [(group.start, group.stop, group.method) for group in found.groups]
    assert finish_of(groups, backward, sizes, methods) == pytest.approx(found.finish_seconds)


@pytest.mark.parametrize("seed", range(4))
def test_none_finishes_earlier_with_more_tensors_and_one_method(seed):
    backward, sizes, methods = case(seed, tensors=10)
    found = plan(backward, sizes, methods[:1])
    least = least_of_all(backward, sizes, methods[:1])
    assert found.finish_seconds == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_proved_holds_where_fronts_are_cut(seed, monkeypatch):
    monkeypatch.setattr(_optimal, "_WIDTHS", (1, 2))
    backward, sizes, methods = case(seed, tensors=6)
    least = least_of_all(backward, sizes, methods)
    found = plan(backward, sizes, methods)
    assert found.lower_bound_seconds <= least * (1 + 1e-12)
    assert least <= found.finish_seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_never_above_a_published_rule(seed):
    backward, sizes, methods = case(seed, tensors=40)
    found = plan(backward, sizes, methods)
    for method in methods:
        for rule in RULES:
            other = rule(backward, sizes, method)
            assert found.finish_seconds <= other.finish_seconds
            assert found.lower_bound_seconds <= other.finish_seconds * (1 + 1e-12)


def test_the_counter_example_to_the_published_rule():
    backward, sizes, method = COUNTER
    found = plan(backward, sizes, [method])
    assert [(group.start, group.stop) for group in found.groups] == [(0, 1), (1, 3)]
    assert found.finish_seconds == pytest.approx(16.0)
    assert found.gap == 0
    for published in (True, False):
        greedy = omgs_greedy(backward, sizes, method, as_published=published)
        assert greedy.groups == (Merge(0, 3, "sparse"),)
        assert greedy.finish_seconds == pytest.approx(18.2)


def test_each_group_takes_the_method_that_suits_it():
    """A large tensor pays for selection, small ones do not."""
    sparse = affine("sparse", (1.0, 0.0), (1.0, 0.01))
    dense = affine("dense", (0.0, 0.0), (0.5, 1.0))
    found = plan([1, 1, 50, 1], [1, 100, 1, 1], [dense, sparse])
    by_tensor = {
        tensor: group.method for group in found.groups for tensor in range(group.start, group.stop)
    }
    assert by_tensor[1] == "sparse"
    assert by_tensor[3] == "dense"


def test_of_equal_methods_the_first_is_taken():
    one, other = (affine(name, (0.0, 0.0), (1.0, 1.0)) for name in ("one", "other"))
    assert plan([1], [1], [one, other]).groups == (Merge(0, 1, "one"),)
    assert plan([1], [1], [other, one]).groups == (Merge(0, 1, "other"),)


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: 2.0 if n > 20 else 1.0,  # has no truth for an array
        lambda n: 1 + n.bit_length(),
        lambda n: 1.5,  # gives no array
        lambda n: np.full(np.shape(n), 3.0) if np.ndim(n) else 1 + n,  # another thing for one
        PiecewiseCost(sizes=(0.0, 20.0, 40.0), seconds=(1.0, 1.0, 3.0)),
        lambda n: 0,
    ],
)
def test_costs_mean_what_they_give_for_one_size(cost):
    backward, sizes = [1, 0, 2, 1, 1], [3, 1, 20, 5, 8]
    methods = [
        Method(name="any", select_seconds=cost, communicate_seconds=cost),
        affine("affine", (0.0, 0.1), (2.0, 0.05)),
    ]
    found = plan(backward, sizes, methods)
    assert found.finish_seconds == pytest.approx(least_of_all(backward, sizes, methods))


def test_nothing_takes_any_time():
    free = Method(name="free", select_seconds=lambda n: 0, communicate_seconds=lambda n: 0)
    found = plan([0, 0], [1, 1], [free])
    assert (found.finish_seconds, found.gap) == (0, 0)


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
    computing = [span for span in spans if span.what != "communicate"]
    busy = sum(span.end_seconds - span.start_seconds for span in computing)
    assert busy == pytest.approx(computing[-1].end_seconds)
    sends = {span.group: span.start_seconds for span in spans if span.what == "communicate"}
    for span in computing:
        assert sends.get(span.group, math.inf) >= span.end_seconds - 1e-12


def test_a_plan_under_other_times():
    backward, sizes, method = COUNTER
    found = plan(backward, sizes, [method])
    late = found.timeline([2, 6, 6], sizes, [method])
    assert late[-1].end_seconds == pytest.approx(14 + 1.2 + 5)
    with pytest.raises(ValueError, match="a plan for 3 tensors was given 2"):
        found.timeline([1, 1], [1, 1], [method])
    with pytest.raises(ValueError, match="travels by 'sparse', but the methods are other"):
        found.timeline(backward, sizes, [affine("other", (0.0, 0.0), (1.0, 0.0))])


def test_json_and_back():
    backward, sizes, methods = case(5, tensors=9)
    found = plan(backward, sizes, methods)
    held = found.to_json()
    assert Plan.from_json(held) == found
    whole = {"groups": [[0, 1, "a"]], "finish_seconds": 2, "lower_bound_seconds": 1}
    assert Plan.from_json(held | whole).gap == 1
    for change, message in (
        ({"format": "gossipgrad profile"}, "not a plan"),
        ({"version": 2}, "a plan of version 2, this reads version 1"),
        ({"more": 1}, r"keys missing \[\] and unknown \['more'\]"),
        ({"groups": []}, "a plan without groups"),
        ({"groups": [[0, 1]]}, r"groups must be a list of \[start, stop, method\]"),
        ({"groups": [[1, 2, "a"]]}, "1 to 2 where one must begin at 0"),
        ({"groups": [[0, 1, "a"], [2, 3, "a"]]}, "2 to 3 where one must begin at 1"),
        ({"groups": [[0, 0, "a"]]}, "0 to 0 where one must begin at 0 and end past it"),
        ({"groups": [[0, 1.0, "a"]]}, "two whole numbers and a name"),
        ({"groups": [[False, 1, "a"]]}, "two whole numbers and a name"),
        ({"groups": [[0, 1, None]]}, "two whole numbers and a name"),
        ({"groups": [[0, 1, ""]]}, "from tensor 0 on names no method"),
        ({"finish_seconds": math.nan}, "finish_seconds is nan: it is a time"),
        ({"lower_bound_seconds": -1.0}, r"lower_bound_seconds is -1\.0: it is a time"),
        ({"finish_seconds": 10**400}, "finish_seconds is 1000"),
        ({"lower_bound_seconds": 1e9}, "above finish_seconds"),
        ({"names": "abcdefghi"}, "names is 'abcdefghi': it is a list"),
        ({"names": list("abcdefgh")}, "a plan for 9 tensors has 8 names"),
        ({"names": list("abcdefgha")}, "two tensors are named 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_json(held | change)
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json([])


def test_names_are_kept_and_files_without_them_are_read():
    bare = Plan(groups=(Merge(0, 2, "a"),), finish_seconds=2, lower_bound_seconds=1)
    assert "names" not in bare.to_json()
    assert Plan.from_json(bare.to_json()).names == ()
    named = replace(bare, names=("last", "first"))
    assert named.to_json()["names"] == ["last", "first"]
    assert Plan.from_json(json.loads(json.dumps(named.to_json()))) == named != bare


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", 1), "the name of tensor 1 is 1: names are strings"),
        (["a", "b"], r"names is \['a', 'b'\]: give a tuple"),
        ("ab", "names is 'ab': give a tuple"),
        ({"names": 1}, "names is {'names': 1}: give a tuple"),
    ],
)
def test_names_that_are_none(names, message):
    plain = getattr(Plan.__init__, "__wrapped__", Plan.__init__)
    given = {"groups": (Merge(0, 2, "a"),), "finish_seconds": 2, "lower_bound_seconds": 1}
    with pytest.raises(ValueError, match=message):
        plain(object.__new__(Plan), **given, names=names)


def test_a_plan_without_a_bound_has_a_gap_without_one():
    group = Merge(0, 1, "a")
    assert Plan(groups=(group,), finish_seconds=1.0, lower_bound_seconds=0.0).gap == math.inf


@pytest.mark.parametrize("given", [-1.0, math.nan, math.inf, "soon", None])
@pytest.mark.parametrize("tensors", [2, 30])
def test_costs_that_are_no_time(given, tensors):
    def bad(elements):
        if np.ndim(elements):
            return np.where(elements == 2, -1.0, 1.0) if given == -1.0 else elements * np.nan
        return given if elements == 2 else 1.0

    method = Method(name="bad", select_seconds=lambda n: 0, communicate_seconds=bad)
    message = f"communicate_seconds of method 'bad' gives {given!r} for 2 elements"
    with pytest.raises(ValueError, match=message):
        plan([1.0] * tensors, [1] * tensors, [method])


def test_methods_that_are_none():
    dense = affine("dense", (0.0, 0.0), (1.0, 0.0))
    with pytest.raises(ValueError, match="there is no method to send by"):
        plan([1], [1], [])
    with pytest.raises(ValueError, match="two methods are called 'dense'"):
        plan([1], [1], [dense, dense])
    with pytest.raises(ValueError, match="a method needs a name"):
        affine("", (0.0, 0.0), (1.0, 0.0))


def test_many_tensors_take_little_time_and_lose_little():
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
    begun = time.process_time()
    found = plan(profile.backward_seconds, profile.elements, methods)
    assert time.process_time() - begun < 1.0
    assert found.gap < 1e-3
