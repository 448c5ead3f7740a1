"""Schedules from graphs and from matrices."""

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad import topology
from gossipgrad.topology import from_graph, from_matrix
from gossipgrad.topology._edge_colouring import colour_edges


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    nodes = draw(st.integers(2, 24))
    pairs = [(u, v) for u in range(nodes) for v in range(u + 1, nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=150))
    return nodes, edges


@given(graphs())
def test_colouring_is_proper_and_takes_at_most_one_colour_more_than_the_degree(graph):
    nodes, edges = graph
    matchings = colour_edges(nodes, edges)
    degree = np.bincount(np.array(edges, int).reshape(-1), minlength=nodes).max()
    for matching in matchings:
        ends = [node for edge in matching for node in edge]
        assert len(ends) == len(set(ends)) > 0
    coloured = sorted(edge for matching in matchings for edge in matching)
    assert coloured == sorted(edges)
    assert degree <= len(matchings) <= degree + 1 or not edges


@pytest.mark.parametrize(
    ("graph", "period"),
    [
        (networkx.path_graph(6), 2),
        (networkx.cycle_graph(8), 2),
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
    graph = networkx.convert_node_labels_to_integers(graph)
    schedule = from_graph(graph)
    assert schedule.period == period
    met = {
        (min(rank, partner), max(rank, partner))
        for t in range(period)
        for rank, partner in enumerate(schedule.round_peers(t).send_to.tolist())
        if partner >= 0
    }
    assert met == {(min(edge), max(edge)) for edge in graph.edges()}


@pytest.mark.parametrize("seed", range(20))
def test_dense_graphs_reach_the_fan_and_stay_within_one(seed):
    graph = networkx.gnp_random_graph(31, 0.8, seed=seed)
    schedule = from_graph(graph, seed=seed)
    assert schedule.period <= max(dict(graph.degree).values()) + 1


def test_the_same_graph_gives_the_same_schedule_in_whatever_order_it_was_built():
    edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    graph = networkx.Graph(edges)
    turned = networkx.Graph([(v, u) for u, v in reversed(edges)])
    assert from_graph(graph) == from_graph(turned)
    assert from_graph(graph).describe() == from_graph(turned).describe()
    other = from_graph(networkx.cycle_graph(4))
    assert other.describe() != from_graph(graph).describe()
    assert set(other.describe()) == {
        "name",
        "world_size",
        "rotate",
        "seed",
        "matchings",
        "sha256",
    }


def test_the_seed_picks_among_the_colourings():
    graph = networkx.random_regular_graph(4, 20, seed=1)
    assert len({from_graph(graph, seed=seed) for seed in range(5)}) > 1
    assert from_graph(graph, seed=3) == from_graph(graph, seed=3)


def test_a_graph_of_one_rank():
    graph = networkx.Graph()
    graph.add_node(0)
    assert from_graph(graph).peers(3, 0) == topology.Peers(None, None)
    assert from_matrix(np.ones((1, 1))).peers(3, 0) == topology.Peers(None, None)


def test_a_matrix_gives_each_pair_its_entry():
    weights = np.array(
        [
            [0.5, 0.2, 0.0, 0.3],
            [0.2, 0.7, 0.1, 0.0],
            [0.0, 0.1, 0.5, 0.4],
            [0.3, 0.0, 0.4, 0.3],
        ]
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


def test_small_weights_apply_the_matrix_to_first_order():
    laplacian = networkx.laplacian_matrix(networkx.petersen_graph()).toarray()
    errors = []
    for step in (1e-2, 1e-3):
        weights = np.eye(10) - step * laplacian
        schedule = from_matrix(weights)
        product = topology.mixing_product(schedule, schedule.period)
        errors.append(np.abs(product - weights).max())
    assert errors[1] < errors[0] / 50


def test_both_ends_take_the_same_share_of_a_matrix_rounded_differently():
    weights = np.array([[0.7, 0.3], [0.3 + 1e-9, 0.7 - 1e-9]])
    schedule = from_matrix(weights)
    assert schedule.weight(0, 0) == schedule.weight(0, 1)


def test_weights_that_differ_in_the_last_bit_are_another_schedule():
    one = from_matrix(np.array([[0.7, 0.3], [0.3, 0.7]]))
    more = np.nextafter(0.3, 1)
    other = from_matrix(np.array([[0.7, more], [more, 0.7]]))
    assert one.describe() != other.describe()
    assert one.describe() != from_graph(networkx.path_graph(2)).describe()


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (networkx.DiGraph([(0, 1)]), r"the graph is directed: pass networkx.Graph\(graph\)"),
        (networkx.MultiGraph([(0, 1), (0, 1)]), "the graph is a multigraph: pass"),
        (
            networkx.Graph([("a", "b")]),
            "the graph's 2 nodes are not the ranks 0 to 1: "
            r"networkx.convert_node_labels_to_integers\(graph\) numbers them",
        ),
        (networkx.Graph([(1, 2)]), "2 nodes are not the ranks 0 to 1"),
        (networkx.Graph(), "world size 0 has no ranks"),
        (networkx.Graph([(0, 1), (1, 1)]), "node 1 has an edge to itself"),
        (
            networkx.Graph([(0, 2), (1, 3)]),
            "the graph falls apart into 2 components that would never mix, ranks 0, 2; 1, 3: "
            "add edges between them",
        ),
        (
            networkx.disjoint_union_all([networkx.path_graph(10)] * 6),
            r"into 6 components .*ranks 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.; 10, .*; \.\.\.: add",
        ),
    ],
)
def test_bad_graphs_are_named_with_the_way_out(graph, message):
    with pytest.raises(ValueError, match=message):
        from_graph(graph)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 3)), r"one row and one column for each rank, got shape \(2, 3\)"),
        (np.ones((0, 0)), r"got shape \(0, 0\)"),
        (
            np.array([[1.5, -0.5], [-0.5, 1.5]]),
            "weight -0.5 between ranks 0 and 1: weights are finite and not negative",
        ),
        (np.array([[1.0, 0.0], [0.0, np.nan]]), "weight nan between ranks 1 and 1"),
        (
            np.array([[0.5, 0.5], [0.5, 0.4]]),
            "row 1 of the weights sums to 0.9, not to 1, so the mean would not be kept: "
            "give the rest to the diagonal",
        ),
        (
            np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]),
            "weights 0.5 from rank 1 to 0 and 0 back differ: "
            "both ends of a pair take the same share, make the matrix symmetric",
        ),
        (np.eye(3), "the graph falls apart into 3 components"),
    ],
)
def test_bad_matrices_are_named_with_the_way_out(weights, message):
    with pytest.raises(ValueError, match=message):
        from_matrix(weights)


def test_bad_seeds_are_refused():
    for build in (
        lambda: from_graph(networkx.path_graph(2), seed=-1),
        lambda: from_matrix(np.full((2, 2), 0.5), seed=-1),
    ):
        with pytest.raises(ValueError, match="seed -1 is out of range"):
            build()
