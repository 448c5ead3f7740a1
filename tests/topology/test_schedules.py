"""What every schedule promises, whatever its kind."""

import json
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import SCHEDULE_NAMES, Peers, Schedule, by_name

SYMMETRIC = ["hypercube", "matching", "complete", "ring", "graph", "matrix"]


@st.composite
def connected_graphs(draw: st.DrawFn) -> networkx.Graph:
    """A path through all ranks and some edges more."""
    world_size = draw(st.integers(1, 24))
    graph = networkx.path_graph(world_size)
    ranks = st.integers(0, world_size - 1)
    more = draw(st.lists(st.tuples(ranks, ranks), max_size=60))
    graph.add_edges_from((u, v) for u, v in more if u != v)
    return graph


@st.composite
def builders(draw: st.DrawFn) -> Callable[[], Schedule]:
    """How to build any schedule; not the schedule: type checks draw random numbers of their own."""
    seed = draw(st.integers(0, 2**64 - 1))
    name = draw(st.sampled_from([*SCHEDULE_NAMES, "graph", "matrix"]))
    if name == "graph":
        return partial(topology.from_graph, draw(connected_graphs()), seed=seed)
    if name == "matrix":
        weights = metropolis_weights(draw(connected_graphs()))
        return partial(topology.from_matrix, weights, seed=seed)
    world_size = 2 ** draw(st.integers(0, 7)) if name == "hypercube" else draw(st.integers(1, 130))
    return partial(by_name, name, world_size, seed=seed, rotate=draw(st.booleans()))


def metropolis_weights(graph: networkx.Graph) -> np.ndarray:
    weights = np.zeros((len(graph), len(graph)))
    for u, v in graph.edges():
        weights[u, v] = weights[v, u] = 1 / (1 + max(graph.degree[u], graph.degree[v]))
    return weights + np.diag(1 - weights.sum(axis=1))


@given(builders(), st.integers(0, 10**12))
def test_every_send_meets_its_receive(build, round):
    schedule = build()
    send_to, recv_from = schedule.round_peers(round)
    ranks = np.arange(schedule.world_size)
    taking_part = send_to >= 0

    assert ((recv_from >= 0) == taking_part).all()
    assert (recv_from[send_to[taking_part]] == ranks[taking_part]).all()
    assert sorted(send_to[taking_part]) == ranks[taking_part].tolist()
    assert (send_to != ranks).all()
    assert send_to.max() < schedule.world_size


@given(builders(), st.integers(0, 10**12))
def test_one_rank_answers_like_all_together(build, round):
    schedule = build()
    together = schedule.round_peers(round)
    for rank in range(0, schedule.world_size, 1 + schedule.world_size // 10):
        send_to, recv_from = schedule.peers(round, rank)
        assert (-1 if send_to is None else send_to) == together.send_to[rank]
        assert (-1 if recv_from is None else recv_from) == together.recv_from[rank]
        assert schedule.weight(round, rank) == schedule.round_weights(round)[rank]


@given(builders(), st.integers(0, 10**12))
def test_symmetric_schedules_receive_from_whom_they_send_to(build, round):
    schedule = build()
    send_to, recv_from = schedule.round_peers(round)
    if schedule.symmetric:
        assert (send_to == recv_from).all()
    assert schedule.symmetric == (schedule.name in SYMMETRIC or schedule.world_size <= 2)


@given(builders(), st.integers(0, 10**6), st.floats(0, 1))
def test_mixing_matrices_are_doubly_stochastic(build, round, weight):
    schedule = build()
    matrix = schedule.mixing_matrix(round, weight)
    assert topology.is_doubly_stochastic(matrix)
    if schedule.symmetric:
        assert np.array_equal(matrix, matrix.T)


@given(builders())
def test_schedules_are_values(build):
    schedule = build()
    twin = pickle.loads(pickle.dumps(schedule))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert twin.peers(5, 0) == schedule.peers(5, 0)
    assert json.loads(json.dumps(schedule.describe())) == schedule.describe()


@given(st.integers(1, 200), st.integers(0, 10**9))
def test_as_few_ranks_as_possible_sit_out(world_size, round):
    for name in ("matching", "complete"):
        sitting_out = (by_name(name, world_size).round_peers(round).send_to < 0).sum()
        assert sitting_out == world_size % 2
    busy = by_name("dissemination", world_size).round_peers(round).send_to >= 0
    assert busy.all() == (world_size > 1)


@pytest.mark.parametrize("world_size", range(2, 41))
def test_complete_pairs_all_once_a_period(world_size):
    schedule = topology.complete(world_size, seed=5)
    met = np.zeros((world_size, world_size), int)
    for t in range(schedule.period, 2 * schedule.period):
        for rank, partner in enumerate(schedule.round_peers(t).send_to):
            if partner >= 0:
                met[rank, partner] += 1
    assert np.array_equal(met, 1 - np.eye(world_size, dtype=int))


@pytest.mark.parametrize("world_size", range(2, 41))
def test_matchings_of_a_period_differ_in_every_pair(world_size):
    schedule = topology.matching(world_size, seed=5)
    for rank in range(world_size):
        met = [schedule.peers(t, rank).send_to for t in range(schedule.period)]
        assert len(set(met)) == schedule.period


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 12, 13])
def test_ring_meets_both_neighbours_once_a_period(world_size):
    schedule = topology.ring(world_size)
    assert schedule.period == {2: 1}.get(world_size, 2 + world_size % 2)
    for rank in range(world_size):
        met = [schedule.peers(t, rank).send_to for t in range(schedule.period)]
        neighbours = {(rank - 1) % world_size, (rank + 1) % world_size}
        assert sorted(partner for partner in met if partner is not None) == sorted(neighbours)


def test_a_ring_rotates_only_when_told():
    assert topology.ring(8, seed=1) != topology.ring(8, seed=2)
    assert topology.ring(8, seed=1).peers(5, 0) == topology.ring(8, seed=2).peers(5, 0)
    turned = topology.ring(8, seed=1, rotate=True)
    partners = {turned.peers(t, 0).send_to for t in range(2 * 30)}
    assert partners == set(range(1, 8))
    assert by_name("ring", 8, rotate=True, seed=1) == turned


def test_directions_are_those_of_the_paper():
    dissemination = topology.dissemination(10, rotate=False)
    assert dissemination.period == 4
    assert [dissemination.peers(t, rank=3) for t in range(5)] == [
        Peers(send_to=2, recv_from=4),
        Peers(send_to=1, recv_from=5),
        Peers(send_to=9, recv_from=7),
        Peers(send_to=5, recv_from=1),
        Peers(send_to=2, recv_from=4),
    ]
    hypercube = topology.hypercube(16, rotate=False)
    assert [hypercube.peers(t, rank=5).send_to for t in range(4)] == [4, 7, 1, 13]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_single_rank_meets_nobody(name):
    schedule = by_name(name, 1)
    assert schedule.period == 1
    assert schedule.peers(7, 0) == Peers(send_to=None, recv_from=None)
    assert schedule.mixing_matrix(7).tolist() == [[1.0]]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_two_ranks_always_meet(name):
    schedule = by_name(name, 2)
    assert schedule.symmetric
    assert [schedule.peers(t, 0).send_to for t in range(5)] == [1] * 5


@pytest.mark.parametrize("name", ["dissemination", "hypercube", "matching", "complete"])
def test_rotation_changes_partners_and_the_seed_picks_them(name):
    def played(schedule: Schedule) -> list[list[int]]:
        return [schedule.round_peers(t).send_to.tolist() for t in range(4 * schedule.period)]

    still = by_name(name, 16, rotate=False)
    assert still.round_peers(0).send_to.tolist() == (
        still.round_peers(still.period).send_to.tolist()
    )
    turning = played(by_name(name, 16, seed=1))
    period = by_name(name, 16).period
    assert turning[:period] != turning[period : 2 * period]
    assert turning == played(by_name(name, 16, seed=1))
    assert turning != played(by_name(name, 16, seed=2))


def test_descriptions_are_equal_only_for_equal_schedules():
    described = [
        topology.dissemination(8).describe(),
        topology.dissemination(8, seed=1).describe(),
        topology.dissemination(9).describe(),
        topology.dissemination(8, rotate=False).describe(),
        topology.hypercube(8).describe(),
        topology.matching(8).describe(),
        topology.complete(8).describe(),
        topology.ring(8).describe(),
    ]
    for index, one in enumerate(described):
        assert described.index(one) == index
    assert described[0] == {"name": "dissemination", "world_size": 8, "rotate": True, "seed": 0}
    assert by_name("dissemination", 8, seed=3).describe() == (
        topology.dissemination(8, seed=3).describe()
    )
    unturned = [topology.hypercube(8, seed=seed, rotate=False).describe() for seed in (1, 2)]
    assert unturned[0] == unturned[1]


@pytest.mark.parametrize("name", ["dissemination", "matching", "ring"])
def test_many_ranks_and_far_rounds_are_answered_at_once(name):
    schedule = by_name(name, 100_000)
    start = time.thread_time()
    first = schedule.peers(10**9, 12_345)
    again = schedule.peers(10**9, 12_345)
    last = schedule.peers(2**63 - 1, 99_999)
    assert time.thread_time() - start < 1.0
    assert first == again
    assert last.send_to != 99_999


def test_threads_may_share_a_schedule():
    schedule = topology.matching(33)
    rounds = [t * schedule.period for t in range(60)]
    expected = [schedule.round_peers(t).send_to.tolist() for t in rounds]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            answers = threads.map(lambda t: schedule.round_peers(t).send_to.tolist(), rounds)
            assert list(answers) == expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: topology.dissemination(0), "world size 0 has no ranks: it must be 1 or more"),
        (lambda: topology.ring(-1), "world size -1 has no ranks"),
        (lambda: topology.matching(4, seed=-1), "seed -1 is out of range: choose one from 0 to 2"),
        (lambda: topology.complete(4, seed=2**64), f"seed {2**64} is out of range"),
        (
            lambda: topology.hypercube(12),
            r"hypercube needs a world size that is a power of two, got 12: "
            r"dissemination\(12\) and matching\(12\) work for any",
        ),
        (
            lambda: by_name("torus", 4),
            "no schedule is called 'torus': choose one of dissemination, hypercube, matching, "
            "complete, ring, or build one with from_graph or from_matrix",
        ),
        (lambda: topology.ring(4).peers(-1, 0), "round -1 is out of range: rounds count from 0"),
        (lambda: topology.ring(4).round_peers(2**63), f"round {2**63} is out of range"),
        (
            lambda: topology.ring(4).peers(0, 4),
            "rank 4 is outside world size 4: ranks run from 0 to 3",
        ),
        (lambda: topology.ring(4).weight(0, -1), "rank -1 is outside world size 4"),
        (
            lambda: topology.ring(4).mixing_matrix(0, weight=1.5),
            r"weight 1.5 is out of range: it is the share of the delta that a rank takes, 0 to 1",
        ),
    ],
)
def test_bad_input_is_named_with_the_way_out(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_hypercube_refuses_every_other_world_size():
    for world_size in range(1, 130):
        if world_size.bit_count() == 1:
            assert topology.hypercube(world_size).world_size == world_size
        else:
            with pytest.raises(ValueError, match="power of two"):
                topology.hypercube(world_size)
