"""What every schedule promises, whatever its kind."""

import json
import pickle
from collections.abc import Callable
from functools import partial

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import SCHEDULE_NAMES, Schedule, by_name


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
        return partial(topology.from_matrix, metropolis_weights(draw(connected_graphs())))
    world_size = 2 ** draw(st.integers(0, 7)) if name == "hypercube" else draw(st.integers(1, 130))
    return partial(by_name, name, world_size, seed=seed, rotate=draw(st.booleans()))


def metropolis_weights(graph: networkx.Graph) -> np.ndarray:
    weights = np.zeros((len(graph), len(graph)))
    for u, v in graph.edges():
        weights[u, v] = weights[v, u] = 1 / (1 + max(graph.degree[u], graph.degree[v]))
    return weights + np.diag(1 - weights.sum(axis=1))


@given(builders(), st.integers(0, 10**12), st.floats(0, 1))
def test_every_send_meets_its_receive_and_the_mean_is_kept(build, round, weight):
    schedule = build()
    send_to, recv_from = schedule.round_peers(round)
    ranks = np.arange(schedule.world_size)
    takes_part = send_to >= 0
    assert ((recv_from >= 0) == takes_part).all()
    assert (recv_from[send_to[takes_part]] == ranks[takes_part]).all()
    assert sorted(send_to[takes_part]) == ranks[takes_part].tolist()
    assert (send_to != ranks).all()
    assert schedule.symmetric == (schedule.name != "dissemination" or schedule.world_size <= 2)
    assert not schedule.symmetric or (send_to == recv_from).all()

    matrix = schedule.mixing_matrix(round, weight)
    assert matrix.min() >= 0
    assert np.allclose([matrix.sum(0), matrix.sum(1)], 1)
    assert not schedule.symmetric or np.array_equal(matrix, matrix.T)


@given(builders(), st.integers(0, 10**12))
def test_a_schedule_is_a_value_and_one_rank_answers_like_all_together(build, round):
    schedule = build()
    twin = pickle.loads(pickle.dumps(schedule))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert json.loads(json.dumps(twin.describe())) == schedule.describe()
    together = schedule.round_peers(round)
    for rank in range(0, schedule.world_size, 1 + schedule.world_size // 5):
        send_to, recv_from = twin.peers(round, rank)
        assert (-1 if send_to is None else send_to) == together.send_to[rank]
        assert (-1 if recv_from is None else recv_from) == together.recv_from[rank]
        assert schedule.weight(round, rank) == schedule.round_weights(round)[rank]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13, 40, 41])
def test_as_few_ranks_as_possible_sit_out_and_pairs_of_a_period_differ(world_size):
    for name in ("matching", "complete"):
        schedule = by_name(name, world_size, seed=5)
        met = np.zeros((world_size, world_size + 1), int)
        for t in range(schedule.period, 2 * schedule.period):
            send_to = schedule.round_peers(t).send_to
            assert (send_to < 0).sum() == world_size % 2
            met[np.arange(world_size), send_to] += 1
        assert met.max() <= 1
        if name == "complete":
            assert np.array_equal(met[:, :-1], 1 - np.eye(world_size, dtype=int))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_rotation_changes_partners_and_the_seed_picks_them(name):
    def partners(period: int, **options) -> list[list[int]]:
        schedule = by_name(name, 16, **options)
        rounds = range(period * schedule.period, (period + 1) * schedule.period)
        return [schedule.round_peers(t).send_to.tolist() for t in rounds]

    assert partners(0, rotate=False) == partners(1, rotate=False)
    assert partners(0, rotate=True) != partners(1, rotate=True)
    assert partners(0, rotate=True) != partners(0, rotate=True, seed=1)
    assert (partners(0) == partners(1)) == (name == "ring")


def test_descriptions_are_equal_only_for_equal_schedules():
    described = [by_name(name, 8).describe() for name in SCHEDULE_NAMES]
    described += [
        topology.dissemination(8, seed=1).describe(),
        topology.dissemination(9).describe(),
        topology.dissemination(8, rotate=False).describe(),
    ]
    assert all(described.count(one) == 1 for one in described)
    unturned = [topology.hypercube(8, seed=seed, rotate=False).describe() for seed in (1, 2)]
    assert unturned[0] == unturned[1]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: topology.dissemination(0), "world size 0"),
        (lambda: topology.matching(4, seed=-1), "seed -1"),
        (lambda: topology.complete(4, seed=2**64), f"seed {2**64}"),
        (lambda: topology.hypercube(12), "power of two, got 12"),
        (lambda: by_name("torus", 4), "'torus'.*matching"),
        (lambda: topology.ring(4).peers(-1, 0), "round -1"),
        (lambda: topology.ring(4).round_peers(2**63), f"round {2**63}"),
        (lambda: topology.ring(4).peers(0, 4), "rank 4"),
        (lambda: topology.ring(4).weight(0, -1), "rank -1"),
        (lambda: topology.ring(4).mixing_matrix(0, weight=1.5), r"weight 1\.5"),
    ],
)
def test_bad_input_is_named(build, named):
    with pytest.raises(ValueError, match=named):
        build()
