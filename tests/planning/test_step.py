"""Times and sizes of tensors: what they may be, and what is said where they are not."""

import math
import re
from functools import partial

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    Method,
    PiecewiseCost,
    Plan,
    Profile,
    SortingCost,
    dense_all_reduce,
    mg_wfbp,
    omgs_greedy,
    plan,
    single,
    sparse_all_gather,
    threshold,
    wfbp,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")
DENSE = Method("dense", AffineCost(0.0, 0.0), AffineCost(1.0, 1e-9))
RULES = (
    *(single, wfbp, mg_wfbp, omgs_greedy),
    lambda backward, sizes, method: plan(backward, sizes, [method]),
    lambda backward, sizes, method: threshold(backward, sizes, method, size_bytes=8),
    lambda *step: plan([1], [1], [DENSE]).timeline(*step[:2], [DENSE]),
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("backward", "sizes", "message"),
    [
        ([], [], "0 times and 0 sizes: give one of each a tensor"),
        ([1], [1, 2], "1 times and 2 sizes: give one of each a tensor"),
        ([1], [math.inf], "tensor 0 has inf elements: give a whole number, 1 or more"),
        ([1], [math.nan], "tensor 0 has nan elements: give a whole number, 1 or more"),
        ([1], [1.5], r"tensor 0 has 1\.5 elements: give a whole number, 1 or more"),
        ([1], [None], "tensor 0 has None elements: give a whole number, 1 or more"),
        ([1], ["1"], "tensor 0 has '1' elements: give a whole number, 1 or more"),
        ([1, 1], [1, 0], "tensor 1 has 0 elements: leave out tensors without any"),
        ([1, 1], [1 << 62, 1 << 62], r"the tensors up to 1 have 9223372036854775808 elements: all"),
        ([1, -1], [1, 1], "backward of tensor 1 takes -1 seconds: give a time"),
        ([math.nan], [1], "backward of tensor 0 takes nan seconds: give a time"),
        ([math.inf], [1], "backward of tensor 0 takes inf seconds: give a time"),
        ([None], [1], "backward of tensor 0 takes None seconds: give a time"),
        (["1"], [1], "backward of tensor 0 takes '1' seconds: give a time"),
        ([1, 10**400], [1, 1], "backward of tensor 1 takes 1000"),
        ([1e308, 1e308], [1, 1], "backward up to tensor 1 add up to more than a float can hold"),
    ],
)
def test_what_no_step_has(rule, backward, sizes, message):
    with pytest.raises(ValueError, match=message):
        rule(backward, sizes, DENSE)


def test_numbers_of_numpy_are_as_good():
    elements = np.array([1 << 30] * 3, np.int32)  # whose sums overflow
    ours = plan([1.0] * 3, elements.tolist(), [DENSE])
    assert plan(np.ones(3, np.float32), elements, [DENSE]) == ours
    by_bits = Method("bits", lambda n: 0, lambda n: n.bit_length())
    assert plan(np.ones(3), np.array([1, 2, 3]), [by_bits]).gap == 0


def test_as_many_elements_as_fit():
    assert plan([1, 1], [1 << 62, (1 << 62) - 1], [DENSE]).gap == 0


@pytest.mark.parametrize(
    ("what", "given"),
    [
        (what, given)
        for what in ("size_bytes", "first_size_bytes", "element_bytes")
        for given in (math.nan, math.inf, 0, "25 MiB", None)
        if (what, given) != ("first_size_bytes", None)
    ],
)
def test_thresholds_that_are_none(what, given):
    with pytest.raises(ValueError, match=f"{what} is {given!r}: it must be 1 or more"):
        threshold([1] * 3, [1] * 3, DENSE, **({"size_bytes": 8} | {what: given}))


@pytest.mark.parametrize("given", [[DENSE], {"dense": DENSE}, "dense", None])
def test_a_rule_takes_one_method(given):
    for rule in (single, wfbp, mg_wfbp, omgs_greedy, partial(threshold, size_bytes=8)):
        with pytest.raises(
            ValueError, match=r"method is .*: give one gossipgrad\.planning\.Method"
        ):
            rule([1, 1], [1, 1], given)


def test_a_plan_takes_a_list_of_methods():
    for given in (DENSE, {"dense": DENSE}, iter([DENSE]), None):
        message = re.escape(f"methods is {given!r}: give a list of them, [method] for one")
        with pytest.raises(ValueError, match=message):
            plan([1], [1], given)
        with pytest.raises(ValueError, match=message):
            plan([1], [1], [DENSE]).timeline([1], [1], given)
    for given in (["dense"], "dense", [DENSE, None]):
        with pytest.raises(ValueError, match=r"('dense'|'d'|None) is no method: give a gossipgrad"):
            plan([1], [1], given)


@pytest.mark.parametrize("given", [None, "soon", "1", 10**400, -1, math.nan])
def test_a_cost_that_is_fine_for_many_sizes_and_none_for_one(given):
    method = Method("odd", lambda n: 0, lambda n: np.ones(np.shape(n)) if np.ndim(n) else given)
    message = f"communicate_seconds of method 'odd' gives {given!r}"
    with pytest.raises(ValueError, match=message):
        plan([1.0] * 20, [1] * 20, [method])


def test_an_array_of_no_numbers_is_asked_for_one_by_one():
    method = Method(
        "odd", lambda n: 0, lambda n: np.array([None] * len(n)) if np.ndim(n) else 1.0 + n
    )
    plain = Method("odd", lambda n: 0, lambda n: 1.0 + n)
    assert plan([1.0] * 20, [1] * 20, [method]) == plan([1.0] * 20, [1] * 20, [plain])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AffineCost("a", 1.0), "alpha_seconds is 'a': a cost is a finite number"),
        (lambda: AffineCost(None, 1), "alpha_seconds is None: a cost is a finite number"),
        (
            lambda: AffineCost.from_rate(rate_bits_per_second="1Gbit", latency_seconds=0.0),
            "a rate of '1Gbit' bits a second: give a finite number above 0",
        ),
        (lambda: PiecewiseCost(sizes=("a", 2.0), seconds=(1.0, 1.0)), "are finite numbers"),
        (lambda: SortingCost(gamma_seconds="x"), "gamma_seconds is 'x': a cost is a finite number"),
        (lambda: dense_all_reduce(len, element_bytes="4"), "element_bytes is '4': an element has"),
        (
            lambda: sparse_all_gather(len, density="x", world_size=2, select=len),
            "density is 'x': the share",
        ),
        (
            lambda: sparse_all_gather(len, density=0.1, world_size="2", select=len),
            "world size '2' has no ranks",
        ),
        (
            lambda: sparse_all_gather(len, density=0.1, world_size=2, select=len, pair_bytes="8"),
            "pair_bytes is '8'",
        ),
        (
            lambda: dense_all_reduce(None),
            "all_reduce is None: give a function that takes bytes and gives seconds",
        ),
        (
            lambda: dense_all_reduce(len, cast="fp16"),
            "cast is 'fp16': give a function that takes elements and gives seconds",
        ),
        (
            lambda: sparse_all_gather(None, density=0.1, world_size=2, select=len),
            "all_gather is None: give a function that takes bytes and gives seconds",
        ),
        (
            lambda: sparse_all_gather(len, density=0.1, world_size=2, select=len, scatter=5e-9),
            "scatter is 5e-09: give a function that takes pairs and gives seconds",
        ),
        (
            lambda: Profile.load("resnet50").with_batch("8"),
            "batch_size must be a whole number, at least 1, got '8'",
        ),
        (lambda: Profile.load("resnet50").scaled(time="2"), "time must be a positive factor"),
    ],
)
def test_what_is_no_number(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("given", ["1", True, None])
def test_what_is_no_time_of_a_plan(given):
    held = plan([1], [1], [DENSE]).to_json()
    for what in ("finish_seconds", "lower_bound_seconds"):
        with pytest.raises(ValueError, match=f"{what} is {given!r}: it is a time"):
            Plan.from_json(held | {what: given})
