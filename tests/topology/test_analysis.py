"""The analysis against plain dense algebra, and its estimates against the exact figures."""

import time

import numpy as np
import pytest

from gossipgrad import topology
from gossipgrad.topology import _analysis, analyse, by_name, contraction, spectral_gap

NAMES = ["dissemination", "matching", "complete", "ring"]


def dense_product(schedule, rounds, weight=0.5):
    product = np.eye(schedule.world_size)
    for t in range(rounds):
        product = schedule.mixing_matrix(t, weight) @ product
    return product


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 7, 12])
@pytest.mark.parametrize("weight", [0.5, 0.3])
def test_figures_are_those_of_the_dense_product(name, world_size, weight):
    schedule = by_name(name, world_size, seed=4)
    mean = np.full((world_size, world_size), 1 / world_size)

    rounds = 2 * schedule.period + 1
    product = dense_product(schedule, rounds, weight)
    assert np.allclose(topology.mixing_product(schedule, rounds, weight=weight), product)

    left = contraction(schedule, rounds, weight=weight)
    assert left.shape == (rounds + 1,)
    assert left[0] == 1.0
    assert left[-1] == pytest.approx(np.linalg.norm(product - mean) / np.sqrt(world_size - 1))

    two = dense_product(schedule, 2 * schedule.period, weight) - mean
    expected = 1 - np.linalg.norm(two, 2) ** 0.5
    assert spectral_gap(schedule, weight=weight, periods=2) == pytest.approx(expected, abs=1e-7)


def test_the_gap_of_many_periods_is_not_lost_in_rounding():
    schedule = topology.dissemination(12, rotate=False)
    one = dense_product(schedule, schedule.period) - 1 / 12
    radius = np.abs(np.linalg.eigvals(one)).max()
    assert spectral_gap(schedule, periods=200) == pytest.approx(1 - radius, rel=1e-2)


def test_contraction_predicts_the_consensus_distance():
    schedule = topology.matching(24)
    values = np.random.default_rng(1).normal(size=(24, 20_000))
    start = values.std(axis=0)
    left = contraction(schedule, rounds=9)
    for t in range(9):
        values = schedule.mixing_matrix(t) @ values
        measured = np.sqrt((values.var(axis=0)).mean() / (start**2).mean())
        assert measured == pytest.approx(left[t + 1], rel=0.02)


def test_diffusion_is_where_the_product_is_positive():
    schedule = topology.matching(13)
    shares = topology.diffusion(schedule, rounds=6)
    for rounds in range(7):
        expected = (dense_product(schedule, rounds) > 0).mean(axis=1)
        assert shares[rounds] == pytest.approx(expected)
    reached = int(np.argmax(shares.min(axis=1) == 1.0))
    assert topology.rounds_until_all_know_all(schedule) == reached > 0


def test_no_answer_within_max_rounds_is_none():
    found = analyse(topology.ring(40), max_rounds=10)
    assert found.rounds_to_contract_10x is None
    assert found.rounds_to_contract_1000x is None
    assert found.rounds_until_all_know_all is None
    assert topology.rounds_until_all_know_all(topology.ring(40)) == 20


def test_weight_zero_never_mixes():
    found = analyse(topology.matching(8), weight=0.0, max_rounds=20)
    assert found.spectral_gap == pytest.approx(0.0, abs=1e-12)
    assert found.rounds_to_contract_10x is None


@pytest.mark.parametrize("name", ["dissemination", "hypercube", "matching"])
def test_powers_of_two_have_the_whole_gap(name):
    found = analyse(by_name(name, 64))
    assert found.spectral_gap == 1.0
    assert found.rounds_to_contract_1000x == 6
    assert found.doubly_stochastic


def test_a_single_rank_has_nothing_to_do():
    found = analyse(topology.dissemination(1))
    assert found.spectral_gap == 1.0
    assert found.rounds_to_contract_10x == 0
    assert found.rounds_until_all_know_all == 0


@pytest.mark.parametrize("name", ["dissemination", "matching"])
@pytest.mark.parametrize("world_size", [120, 131])
def test_estimates_are_near_the_exact_figures(monkeypatch, name, world_size):
    schedule = by_name(name, world_size)
    exact = analyse(schedule)
    monkeypatch.setattr(_analysis, "EXACT_UP_TO", 1)
    monkeypatch.setattr(_analysis, "_SAMPLED_SOURCES", 60)
    estimate = analyse(schedule)

    assert (exact.exact, estimate.exact) == (True, False)
    assert estimate.spectral_gap >= exact.spectral_gap - 1e-9
    for field in ("rounds_to_contract_10x", "rounds_to_contract_1000x"):
        assert abs(getattr(estimate, field) - getattr(exact, field)) <= 1
    slack = exact.rounds_until_all_know_all - estimate.rounds_until_all_know_all
    assert 0 <= slack <= 2


def test_many_ranks_are_analysed_without_a_dense_matrix():
    start = time.process_time()
    found = analyse(topology.matching(20_000))
    assert time.process_time() - start < 30.0
    assert found.doubly_stochastic
    assert found.rounds_until_all_know_all == 15
    assert topology.diffusion(topology.dissemination(20_000), rounds=15)[-1].min() == 1.0


def test_analysis_notices_a_schedule_that_loses_mass(monkeypatch):
    schedule = topology.dissemination(8)
    peers = schedule.round_peers(0)
    broken = peers._replace(recv_from=np.where(np.arange(8) == 3, -1, peers.recv_from))
    monkeypatch.setattr(type(schedule), "round_peers", lambda *_: broken)
    assert not analyse(schedule, max_rounds=5).doubly_stochastic
    assert not topology.is_doubly_stochastic(schedule.mixing_matrix(0))


@pytest.mark.parametrize(
    "matrix",
    [
        [[0.5, 0.5], [0.4, 0.6]],
        [[0.9, 0.0], [0.0, 0.9]],
        [[1.5, -0.5], [-0.5, 1.5]],
    ],
)
def test_what_is_not_doubly_stochastic(matrix):
    assert not topology.is_doubly_stochastic(np.array(matrix))
    assert topology.is_doubly_stochastic(np.full((2, 2), 0.5))
