"""Methods are what they are made of, for one size and for many."""

import math

import numpy as np
import pytest

from gossipgrad.planning import (
    AffineCost,
    PiecewiseCost,
    SortingCost,
    dense_all_reduce,
    plan,
    sparse_all_gather,
)

WIRE = AffineCost(alpha_seconds=2.0, beta_seconds_per_byte=0.5)
SELECT = AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.125)
SIZES = np.array([1, 8, 100, 1000])


def both(cost):
    """What it gives for all sizes at once, which has to be what it gives for each."""
    at_once = cost(SIZES.astype(float))
    assert at_once.tolist() == pytest.approx([cost(int(size)) for size in SIZES])
    return at_once.tolist()


def test_a_dense_group_travels_whole():
    dense = dense_all_reduce(WIRE)
    assert both(dense.select_seconds) == [0, 0, 0, 0]
    assert both(dense.communicate_seconds) == [2 + 2 * n for n in SIZES]


def test_a_narrow_group_is_cast_before_and_after():
    narrow = dense_all_reduce(WIRE, name="fp16", element_bytes=2, cast=SELECT)
    assert narrow.name == "fp16"
    assert both(narrow.select_seconds) == [1 + 0.125 * n for n in SIZES]
    assert both(narrow.communicate_seconds) == [2 + n + 1 + 0.125 * n for n in SIZES]


def test_a_sparse_group_costs_more_to_add_up_with_more_ranks():
    def sparse(**options):
        return sparse_all_gather(WIRE, density=0.1, select=SELECT, **options)

    pairs = [1, 1, 10, 100]
    alone = sparse(world_size=4)
    assert both(alone.select_seconds) == [1 + 0.125 * n for n in SIZES]
    assert both(alone.communicate_seconds) == [2 + 4 * k for k in pairs]
    added = PiecewiseCost(sizes=(0.0, 1000.0), seconds=(0.0, 1.0))
    for p in (2, 16):
        found = sparse(world_size=p, pair_bytes=6, scatter=added)
        assert both(found.communicate_seconds) == pytest.approx(
            [2 + 3 * k + p * k / 1000 for k in pairs]
        )


def test_sorting_is_dearer_than_linear():
    cost = SortingCost(gamma_seconds=0.5)
    assert both(cost) == pytest.approx([0.5 * n * math.log2(n) for n in SIZES])
    found = SortingCost.fit([2, 64, 1000], [cost(n) for n in (2, 64, 1000)])
    assert found.gamma_seconds == pytest.approx(0.5)
    # In relative errors: twice too slow for one size, and right for another.
    assert SortingCost.fit([4, 4], [4.0, 8.0]).gamma_seconds == pytest.approx(0.6)


def test_plans_of_them():
    methods = [
        dense_all_reduce(WIRE),
        sparse_all_gather(WIRE, density=0.01, world_size=4, select=SELECT),
    ]
    found = plan([1.0] * 20, [1, 1000] * 10, methods)
    assert {group.method for group in found.groups} >= {"sparse"}
    assert found.gap <= 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SortingCost(gamma_seconds=-1.0),
            r"gamma_seconds is -1\.0: a cost is a finite number",
        ),
        (lambda: SortingCost(gamma_seconds=math.nan), "gamma_seconds is nan"),
        (lambda: SortingCost.fit([], []), "0 sizes and 0 times"),
        (lambda: SortingCost.fit([4, 8], [1.0]), "2 sizes and 1 times"),
        (lambda: SortingCost.fit([1], [1.0]), "1 elements in 1 seconds: sort 2 or more"),
        (lambda: SortingCost.fit([4, 8], [1.0, 0.0]), "8 elements in 0 seconds"),
        (lambda: dense_all_reduce(WIRE, element_bytes=0), "element_bytes is 0"),
        (lambda: dense_all_reduce(WIRE, name=""), "a method needs a name"),
        (
            lambda: sparse_all_gather(WIRE, density=0.0, world_size=2, select=SELECT),
            r"density is 0\.0: the share",
        ),
        (
            lambda: sparse_all_gather(WIRE, density=1.5, world_size=2, select=SELECT),
            r"density is 1\.5: the share",
        ),
        (
            lambda: sparse_all_gather(WIRE, density=0.1, world_size=0, select=SELECT),
            "world size 0 has no ranks",
        ),
        (
            lambda: sparse_all_gather(WIRE, density=0.1, world_size=1, select=SELECT, pair_bytes=0),
            "pair_bytes is 0",
        ),
    ],
)
def test_what_is_no_cost_or_method(make, message):
    with pytest.raises(ValueError, match=message):
        make()
