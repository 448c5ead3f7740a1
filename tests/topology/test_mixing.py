"""How fast the schedules contract, against closed forms and bounds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import Schedule, by_name


def left_after(schedule: Schedule, rounds: range) -> float:
    """The worst contraction of the consensus distance over these rounds, by dense algebra."""
    product = np.eye(schedule.world_size)
    for t in rounds:
        product = schedule.mixing_matrix(t) @ product
    return float(np.linalg.norm(product - 1 / schedule.world_size, 2))


def overlap_norm(length: int, overlap: int) -> float:
    """The norm, off the mean, of a circulant of `length` with `overlap` neighbouring ones."""
    return abs(math.sin(math.pi * overlap / length) / math.sin(math.pi / length))


@given(
    st.sampled_from(["dissemination", "hypercube", "matching"]),
    st.integers(0, 7),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**9),
    st.booleans(),
)
def test_powers_of_two_average_exactly_in_one_period(name, log2, seed, index, rotate):
    schedule = by_name(name, 2**log2, seed=seed, rotate=rotate)
    first = index * schedule.period
    values = np.random.default_rng(seed % 1000).normal(size=schedule.world_size)
    mean = values.mean()
    for t in range(first, first + schedule.period):
        recv_from = schedule.round_peers(t).recv_from
        values = values if log2 == 0 else 0.5 * (values + values[recv_from])
    assert np.abs(values - mean).max() < 1e-14


@pytest.mark.parametrize("world_size", range(2, 65))
def test_dissemination_contracts_by_its_closed_form(world_size):
    # One period adds up every number of steps from 0 to 2^L - 1 around the ring of positions: J
    # and, once more, the 2^L - p positions that are reached twice.
    schedule = topology.dissemination(world_size, seed=1)
    reached_twice = 2**schedule.period - world_size
    expected = overlap_norm(world_size, reached_twice) / 2**schedule.period
    periods = (range(schedule.period), range(schedule.period * 9, schedule.period * 10))
    for rounds in periods:
        assert left_after(schedule, rounds) == pytest.approx(expected, abs=1e-12)
    assert expected <= 1 / 4


@pytest.mark.parametrize("world_size", range(2, 65, 2))
def test_matching_contracts_by_its_closed_form_for_even_world_sizes(world_size):
    # The same, on pairs: after a period a rank holds 2^(L-1) neighbouring pairs out of p / 2.
    schedule = topology.matching(world_size, seed=1)
    pairs, held = world_size // 2, 2 ** (schedule.period - 1)
    expected = 0.0 if pairs == 1 else overlap_norm(pairs, held - pairs) / held
    rounds = range(schedule.period * 9, schedule.period * 10)
    assert left_after(schedule, rounds) == pytest.approx(expected, abs=1e-12)
    assert expected <= 1 / 4


@pytest.mark.parametrize("world_size", range(3, 65, 2))
def test_matching_halves_the_distance_each_period_for_odd_world_sizes(world_size):
    # Measured: 0.5 at 3 ranks, where it is met exactly, at most 0.37 above.
    schedule = topology.matching(world_size, seed=1)
    bound = 0.5 if world_size == 3 else 0.4
    assert left_after(schedule, range(schedule.period)) <= bound + 1e-12


@pytest.mark.parametrize("world_size", range(4, 65, 2))
def test_ring_contracts_by_its_closed_form(world_size):
    # Each half of the period projects on pairs: the norm is the cosine of the angle between them.
    expected = math.cos(2 * math.pi / world_size)
    assert left_after(topology.ring(world_size), range(2)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("world_size", range(3, 65))
def test_complete_contracts_within_few_rounds(world_size):
    # What a tournament in the circle's own order fails: it needs about as many rounds as ranks.
    schedule = topology.complete(world_size)
    doublings = math.ceil(math.log2(world_size))
    assert topology.contraction(schedule, rounds=doublings + 4)[-1] <= 0.1


@pytest.mark.parametrize("world_size", [12, 24, 48])
def test_rotation_speeds_mixing_up_where_one_period_is_not_exact(world_size):
    for name in ("dissemination", "matching"):
        rotating = topology.spectral_gap(by_name(name, world_size, rotate=True))
        still = topology.spectral_gap(by_name(name, world_size, rotate=False))
        assert rotating > still + 0.03


@pytest.mark.parametrize("world_size", range(1, 71))
def test_all_know_all_after_one_period(world_size):
    names = ["dissemination"] if world_size % 2 else ["dissemination", "matching"]
    for name in names:
        schedule = by_name(name, world_size)
        expected = 0 if world_size == 1 else schedule.period
        assert topology.rounds_until_all_know_all(schedule) == expected
