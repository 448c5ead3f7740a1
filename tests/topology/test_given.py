"""Schedules from graphs and from matrices."""

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.topology import Schedule, from_graph, from_matrix


def pairs_met(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs of one period, sorted; a pair that meets twice is there twice."""
    return sorted(
        (rank, partner)
        for t in range(schedule.period)
        for rank, partner in enumerate(schedule.round_peers(t).send_to.tolist())
        if rank < partner
    )


def edges_of(graph: networkx.Graph) -> list[tuple[int, int]]:
    return sorted((min(edge), max(edge)) for edge in graph.edges())


@given(st.integers(2, 24), st.floats(0, 1), st.integers(0, 1000))
def test_every_edge_once_a_period_in_at_most_one_round_more_than_the_degree(nodes, density, seed):
    graph = networkx.compose(
        networkx.path_graph(nodes), networkx.gnp_random_graph(nodes, density, seed=seed)
    )
    schedule = from_graph(graph, seed=seed)
    assert pairs_met(schedule) == edges_of(graph)
    degree = max(dict(graph.degree).values())
    assert degree <= schedule.period <= degree + 1


@pytest.mark.parametrize(
    ("graph", "period"),
    [
        (networkx.path_graph(6), 2),
        (networkx.cycle_graph(7), 3),
        (networkx.star_graph(5), 5),
        (networkx.hypercube_graph(4), 4),
        (networkx.grid_2d_graph(4, 6, periodic=True), 4),
        (networkx.complete_bipartite_graph(4, 7), 7),
        (networkx.complete_graph(7), 7),
        (networkx.petersen_graph(), 4),
    ],
)
def test_known_graphs_take_the_rounds_they_must(graph, period):
    assert from_graph(networkx.convert_node_labels_to_integers(graph)).period == period


def test_a_matrix_gives_each_pair_its_entry():
    weights = np.array(
        [[0.5, 0.2, 0.0, 0.3], [0.2, 0.7, 0.1, 0.0], [0.0, 0.1, 0.5, 0.4], [0.3, 0.0, 0.4, 0.3]]
    )
    schedule = from_matrix(weights)
    assert schedule.period == 2
    seen = np.zeros_like(weights)
    for t in range(schedule.period):
        for rank in range(4):
            partner = schedule.peers(t, rank).recv_from
            assert partner is not None
            seen[rank, partner] = schedule.weight(t, rank, default=0.5)
            assert schedule.mixing_matrix(t)[rank, partner] == seen[rank, partner]
    assert np.array_equal(seen, weights - np.diag(weights.diagonal()))


def test_weights_are_equal_at_both_ends_and_compared_to_the_last_bit():
    rounded = from_matrix(np.array([[0.7, 0.3], [0.3 + 1e-9, 0.7 - 1e-9]]))
    assert rounded.weight(0, 0) == rounded.weight(0, 1)
    one = from_matrix(np.array([[0.7, 0.3], [0.3, 0.7]]))
    more = np.nextafter(0.3, 1)
    assert one.describe() != from_matrix(np.array([[0.7, more], [more, 0.7]])).describe()
    assert one.describe() != from_graph(networkx.path_graph(2)).describe()


@pytest.mark.parametrize(
    ("graph", "named"),
    [
        (networkx.DiGraph([(0, 1)]), "directed"),
        (networkx.MultiGraph([(0, 1), (0, 1)]), "multigraph"),
        (networkx.Graph([("a", "b")]), "ranks 0 to 1"),
        (networkx.Graph([(1, 2)]), "ranks 0 to 1"),
        (networkx.Graph(), "world size 0"),
        (networkx.Graph([(0, 1), (1, 1)]), "node 1"),
        (networkx.Graph([(0, 2), (1, 3)]), "2 components.*0, 2; 1, 3"),
        (networkx.disjoint_union_all([networkx.path_graph(10)] * 6), "6 components"),
    ],
)
def test_bad_graphs_are_named(graph, named):
    with pytest.raises(ValueError, match=named):
        from_graph(graph)


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (np.ones((2, 3)), r"\(2, 3\)"),
        (np.ones((0, 0)), r"\(0, 0\)"),
        (np.array([[1.5, -0.5], [-0.5, 1.5]]), "weight -0.5 between ranks 0 and 1"),
        (np.array([[1.0, 0.0], [0.0, np.nan]]), "weight nan between ranks 1 and 1"),
        (np.array([[0.5, 0.5], [0.5, 0.4]]), "row 1 .*0.9"),
        (np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]), "from rank 1 to 0"),
        (np.eye(3), "3 components"),
    ],
)
def test_bad_matrices_are_named(weights, named):
    with pytest.raises(ValueError, match=named):
        from_matrix(weights)
