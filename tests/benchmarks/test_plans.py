"""The brute force that plans are held against knows better than no plan."""

import pytest

from benchmarks import plans
from gossipgrad.planning import Method


def test_brute_force_finds_the_counter_example():
    method = Method(
        name="sparse",
        select_seconds=lambda elements: 0.1 * elements,
        communicate_seconds=lambda elements: 4 + 0.5 * elements,
    )
    step = [1.0, 3.0, 3.0], [10, 1, 1]
    assert plans.least(step, [method]) == pytest.approx(16.0)


def test_few_random_cases():
    found = plans.random_cases(one=6, three=3)
    assert found["one_method"]["largest_difference"] < plans.MISSED
    assert found["three_methods"]["largest_difference"] < plans.MISSED
    for figures in found["rules"].values():
        assert figures["mean_ratio"] > 1 - plans.MISSED
        assert 0 < figures["missed_share"] <= 1
    assert found["rules"]["single"]["missed_share"] < 1
