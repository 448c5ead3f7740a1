"""The schedule of those who are left."""

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import among, by_name, is_doubly_stochastic


@settings(max_examples=30)
@given(
    name=st.sampled_from(topology.SCHEDULE_NAMES),
    world_size=st.sampled_from([2, 4, 8, 16]),
    data=st.data(),
)
def test_the_living_meet_each_other_and_nobody_else(name, world_size, data):
    living = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    left = among(by_name(name, world_size, seed=5), living)
    met = {rank: set() for rank in living}
    for round in range(3 * left.period):
        send_to, recv_from = left.round_peers(round)
        for rank in range(world_size):
            peers = left.peers(round, rank)
            assert (peers.send_to or -1) == (int(send_to[rank]) or -1)
            if rank not in living:
                assert peers == (None, None)
                continue
            for peer in {*peers} - {None}:
                assert peer in living
                assert peer != rank
                met[rank].add(peer)
            if peers.send_to is not None:
                assert recv_from[peers.send_to] == rank
                if left.symmetric:
                    assert peers.recv_from == peers.send_to
        assert is_doubly_stochastic(left.mixing_matrix(round))
    assert all(met.values()) or len(living) == 1, "nobody is left alone"


def test_everybody_living_is_the_schedule_itself():
    schedule = topology.hypercube(4)
    assert among(schedule, range(4)) is schedule


def test_a_hypercube_stays_one_among_a_power_of_two():
    assert among(topology.hypercube(8, seed=3), [0, 2, 4, 6]).describe()["inner"] == {
        "name": "hypercube",
        "world_size": 4,
        "rotate": True,
        "seed": 3,
    }
    assert among(topology.hypercube(8), [0, 2, 4]).inner.name == "matching"


def test_a_given_graph_is_left_as_it_is_without_the_dead():
    schedule = topology.from_graph(networkx.cycle_graph(4))
    left = among(schedule, [0, 1, 2])
    assert left.period == 2
    partners = [[left.peers(round, rank).send_to for rank in range(4)] for round in (0, 1)]
    assert sorted(partners, key=str) == [[1, 0, None, None], [None, 2, 1, None]]
    assert left.weight(0, 0) == 0.5


def test_one_is_left_and_sits_out():
    left = among(topology.dissemination(5), [3])
    assert [left.peers(round, 3) for round in range(4)] == [(None, None)] * 4


@pytest.mark.parametrize(
    ("living", "why"), [([], "nobody is left"), ([0, 4], "rank 4 is outside"), ([-1], "rank -1")]
)
def test_the_living_are_ranks(living, why):
    with pytest.raises(ValueError, match=why):
        among(topology.from_graph(networkx.cycle_graph(4)), living)


@settings(max_examples=20)
@given(
    name=st.sampled_from(topology.SCHEDULE_NAMES),
    living=st.sets(st.integers(0, 12), min_size=2),
)
def test_who_has_joined_meets_the_others_and_nobody_is_met_twice_in_a_round(name, living):
    grown = among(by_name(name, 4, seed=3), living)
    assert grown.world_size == max(4, *(rank + 1 for rank in living))
    met = {rank: set() for rank in living}
    for round in range(3 * grown.period):
        assert is_doubly_stochastic(grown.mixing_matrix(round))
        for rank in living:
            met[rank] |= {*grown.peers(round, rank)} - {None}
    assert all(met.values())
    assert set().union(*met.values()) == living
