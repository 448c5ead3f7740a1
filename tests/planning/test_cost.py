"""Costs as values: what they say, and that fits find them again."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from gossipgrad.planning import AffineCost, PiecewiseCost

ALPHAS = st.floats(0, 1e-1)
BETAS = st.floats(0, 1e-6)
SIZES = st.lists(st.integers(0, 10**9), min_size=2, max_size=12, unique=True)


def relative_square(cost, sizes, seconds):
    return sum(((cost(n) - t) / t) ** 2 for n, t in zip(sizes, seconds, strict=True))


@given(alpha=ALPHAS, beta=BETAS, sizes=SIZES)
def test_an_exact_line_is_found_again(alpha, beta, sizes):
    truth = AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta)
    seconds = [truth(n) for n in sizes]
    if min(seconds) <= 1e-12:
        return
    found = AffineCost.fit(sizes, seconds)
    for n, t in zip(sizes, seconds, strict=True):
        assert found(n) == pytest.approx(t, rel=1e-5)


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
    _, residual = nnls(rows, np.ones(len(points)))
    assert found.alpha_seconds >= 0
    assert found.beta_seconds_per_byte >= 0
    assert relative_square(found, sizes, seconds) <= residual**2 * (1 + 1e-6) + 1e-9


def test_where_the_line_would_begin_below_zero_alpha_is_zero():
    found = AffineCost.fit([1000, 2000], [1.0, 4.0])
    assert found.alpha_seconds == 0
    # The relative errors of b * 1000 against 1 and b * 2000 against 4 balance at 0.0012.
    assert found.beta_seconds_per_byte == pytest.approx(0.0012)


def test_where_larger_ones_are_faster_beta_is_zero():
    found = AffineCost.fit([1000, 2000], [2.0, 1.0])
    assert found.beta_seconds_per_byte == 0
    assert found.alpha_seconds == pytest.approx(1.2)


def test_small_messages_weigh_as_much_as_large_ones():
    """10 % of noise on the largest does not drown a start-up time of a hundredth of it."""
    sizes = [0, 1000, 10**8]
    found = AffineCost.fit(sizes, [1e-3, 1e-3, 0.88])
    assert found.alpha_seconds == pytest.approx(1e-3, rel=0.01)


@given(alpha=ALPHAS, beta=BETAS, p=st.integers(2, 300), n=st.integers(0, 10**9))
def test_a_ring_is_its_hops(alpha, beta, p, n):
    hop = AffineCost(alpha_seconds=alpha, beta_seconds_per_byte=beta)
    ring = hop.ring_all_reduce(p)
    assert ring(n) == pytest.approx(2 * (p - 1) * hop(n / p))
    again = ring.hop_of_ring(p)
    assert again(n) == pytest.approx(hop(n))
    assert hop.ring_all_gather(p)(n) == pytest.approx((p - 1) * hop(n))
    assert hop.halving_all_reduce(p)(n) <= ring(n) * (1 + 1e-12)


def test_a_world_of_one_communicates_for_nothing():
    hop = AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=1.0)
    for cost in (hop.ring_all_reduce(1), hop.ring_all_gather(1), hop.halving_all_reduce(1)):
        assert cost(1000) == 0


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


def test_a_curve_takes_the_median_of_repeats():
    cost = PiecewiseCost.fit([10, 10, 10, 20], [1.0, 50.0, 2.0, 3.0])
    assert cost(10) == 2.0
    assert cost(15) == 2.5


def test_arrays_give_arrays():
    sizes = np.array([0, 1000])
    affine = AffineCost(alpha_seconds=1.0, beta_seconds_per_byte=0.5)
    assert affine(sizes).tolist() == [1.0, 501.0]
    curve = PiecewiseCost(sizes=(0.0, 1000.0), seconds=(1.0, 501.0))
    assert curve(sizes).tolist() == [1.0, 501.0]


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
