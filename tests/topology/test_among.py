"""The schedule after ranks have died or joined."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import among, by_name


@settings(max_examples=30)
@given(
    name=st.sampled_from(topology.SCHEDULE_NAMES),
    world_size=st.sampled_from([2, 4, 8, 16]),
    living=st.sets(st.integers(0, 18), min_size=1),
)
def test_the_living_meet_each_other_and_nobody_else(name, world_size, living):
    left = among(by_name(name, world_size, seed=5), living)
    assert left.world_size == max(world_size, *(rank + 1 for rank in living))
    met = {rank: set() for rank in living}
    for round in range(2 * left.period):
        send_to, recv_from = (ranks.tolist() for ranks in left.round_peers(round))
        assert {rank for rank, to in enumerate(send_to) if to >= 0} <= living
        assert not left.symmetric or send_to == recv_from
        for rank in living:
            if send_to[rank] >= 0:
                assert recv_from[send_to[rank]] == rank
                met[rank] |= {send_to[rank], recv_from[rank]}
    assert all(rank not in partners for rank, partners in met.items())
    assert set().union(*met.values()) == (living if len(living) > 1 else set())
    assert all(met.values()) or len(living) == 1


def test_the_rule_is_kept_where_it_takes_the_number():
    schedule = topology.hypercube(8, seed=3)
    assert among(schedule, range(8)) is schedule
    four = among(schedule, [0, 2, 4, 6])
    assert four.describe()["inner"] == topology.hypercube(4, seed=3).describe()
    three = among(schedule, [0, 2, 4])
    assert three.describe()["inner"] == topology.matching(3, seed=3).describe()


def test_a_given_graph_is_left_as_it_is_without_the_dead():
    left = among(topology.from_graph(networkx.cycle_graph(4)), [0, 1, 2])
    partners = [[left.peers(round, rank).send_to for rank in range(4)] for round in (0, 1)]
    assert left.period == 2
    assert sorted(partners, key=str) == [[1, 0, None, None], [None, 2, 1, None]]
    weighted = among(topology.from_matrix(np.array([[0.7, 0.3], [0.3, 0.7]])), [1])
    assert weighted.weight(0, 1) == 0.3


@pytest.mark.parametrize(("living", "named"), [([], "nobody"), ([0, 4], "rank 4"), ([-1], "-1")])
def test_the_living_are_ranks(living, named):
    with pytest.raises(ValueError, match=named):
        among(topology.from_graph(networkx.cycle_graph(4)), living)
