"""Costs as values: what they say, and that fits find them again."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.planning import AffineCost, PiecewiseCost

ALPHAS = st.floats(0, 1e-1)
BETAS = st.floats(0, 1e-6)


def least_square(rows):
    """Of `rows @ x - 1` over all `x >= 0`: by both columns, one of them, or none."""
    found = [float(len(rows))]
    for columns in ([0, 1], [0], [1]):
        x = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (x >= 0).all():
            found.append(float(((rows[:, columns] @ x - 1) ** 2).sum()))
    return min(found)


def relative_square(cost, sizes, seconds):
    return sum(((cost(n) - t) / t) ** 2 for n, t in zip(sizes, seconds, strict=True))


@settings(max_examples=200)
@given(
    points=st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(1e-5, 10)),
        min_size=2,
        max_size=12,
        unique_by=lambda point: point[0],
    )
)
def test_the_fit_is_the_best_with_both_at_least_zero(points):
    sizes, seconds = zip(*points, strict=True)
    found = AffineCost.fit(sizes, seconds)
    rows = np.array([[1 / t, n / 1e6 / t] for n, t in points])
    least = least_square(rows)
    assert found.alpha_seconds >= 0
    assert found.beta_seconds_per_byte >= 0
    assert relative_square(found, sizes, seconds) <= least * (1 + 1e-6) + 1e-9


@given(alpha=ALPHAS, beta=BETAS, p=st.integers(2, 300), n=st.integers(0, 10**9))
def test_a_ring_is_its_hops(alpha, beta, p, n):
    hop = AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta)
    ring = hop.ring_all_reduce(p)
    assert ring(n) == pytest.approx(2 * (p - 1) * hop(n / p))
    again = ring.hop_of_ring(p)
    assert again(n) == pytest.approx(hop(n))
    assert hop.ring_all_gather(p)(n) == pytest.approx((p - 1) * hop(n))


@given(
    points=st.lists(
        st.tuples(st.integers(0, 10**9), st.floats(1e-6, 10)),
        min_size=2,
        max_size=30,
        unique_by=lambda point: point[0],
    )
)
def test_a_curve_never_falls_and_never_lies_below_a_point(points):
    sizes, seconds = zip(*points, strict=True)
    cost = PiecewiseCost.fit(sizes, seconds)
    asked = np.sort(np.concatenate([np.array(sizes, np.float64), np.linspace(0, 2e9, 50)]))
    values = cost(asked)
    assert (np.diff(values) >= -1e-9).all()
    for n, t in points:
        assert cost(n) >= t or math.isclose(cost(n), t)


def line(alpha=0.0, beta=0.0):
    return AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta)


@pytest.mark.parametrize(
    "make",
    [
        lambda: line(alpha=-1.0),
        lambda: line(beta=math.inf),
        lambda: AffineCost.fit([1, 1], [1.0, 2.0]),
        lambda: AffineCost.fit([1, 2], [1.0]),
        lambda: AffineCost.fit([1, 2], [1.0, 0.0]),
        lambda: PiecewiseCost.fit([1, 2], [1.0, math.nan]),
        lambda: AffineCost.from_rate(rate_bits_per_second=0.0, latency_seconds=0.0),
        lambda: line().ring_all_reduce(0),
        lambda: line().hop_of_ring(1),
        lambda: PiecewiseCost(sizes=(1.0, 1.0), seconds=(1.0, 1.0)),
        lambda: PiecewiseCost(sizes=(1.0, 2.0), seconds=(2.0, 1.0)),
        lambda: PiecewiseCost(sizes=(1.0,), seconds=(2.0,)),
    ],
)
def test_what_is_no_cost(make):
    with pytest.raises(ValueError, match=r"cost|size|time|rate|rank|curve|measure"):
        make()
