"""Schedules from a graph, or from a matrix of mixing weights."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ._edge_colouring import Edge, colour_edges
from ._rotation import relabelling
from ._schedule import NOBODY, Ranks, Schedule, check_seed

if TYPE_CHECKING:
    import networkx

_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSchedule(Schedule):
    """See `from_graph` and `from_matrix`."""

    partners: tuple[tuple[int, ...], ...] = field(repr=False)
    """For each matching the partner of every rank, -1 for none."""
    weights: tuple[tuple[float, ...], ...] | None = field(default=None, repr=False)
    """For each matching the weight of every rank's partner, 0 for none."""

    @property
    def period(self) -> int:
        """The number of matchings that the graph's edges were coloured into."""
        return len(self.partners)

    @property
    def symmetric(self) -> bool:
        """True: partners send to each other."""
        return True

    def _peers_of_all(self, round: int) -> tuple[Ranks, Ranks]:
        partners = np.array(self.partners[round % self.period], np.int64)
        return partners, partners

    def round_weights(self, round: int, default: float = 0.5) -> Float[np.ndarray, " rank"]:
        """The weights of the matrix, whatever the default; see `Schedule.round_weights`."""
        if self.weights is None:
            return np.full(self.world_size, default)
        return np.array(self.weights[round % self.period])

    def describe(self) -> dict:
        """Return the identity of this schedule; see `Schedule.describe`.

        The matchings, which may be many, are given as their SHA-256, with the weights of a matrix
        to the last bit.
        """
        identity: object = self.partners
        if self.weights is not None:
            identity = [self.partners, [[weight.hex() for weight in row] for row in self.weights]]
        return {
            "name": self.name,
            "world_size": self.world_size,
            "rotate": False,
            "seed": None,
            "matchings": self.period,
            "sha256": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        }


def from_graph(graph: "networkx.Graph", *, seed: int = 0) -> GivenSchedule:
    """Return a schedule that only pairs neighbours of a graph, such as fast links.

    The edges are coloured into matchings, one matching a round, always in the same order: as many
    rounds a period as the largest degree when the graph is bipartite, at most one more when it is
    not (`schedule.period` says how many). Ranks that a matching leaves out sit the round out.
    Each edge is used once per period, with equal weight: edge attributes are ignored.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        graph: undirected and connected, with the ranks 0 to world size - 1 for nodes.
        seed: picks among the colourings, 0 to 2**64 - 1; the same on all ranks.

    Returns:
        The schedule; it keeps nothing of the graph object.

    Raises:
        ValueError: when the graph is directed, a multigraph, has self-loops, other nodes, or is
            not connected; the message names the parts.

    Example:
        >>> import networkx
        >>> schedule = from_graph(networkx.star_graph(3))
        >>> schedule.period, schedule.symmetric
        (3, True)
    """
    check_seed(seed)
    if graph.is_directed() or graph.is_multigraph():
        kind = "directed" if graph.is_directed() else "a multigraph"
        raise ValueError(f"the graph is {kind}: pass networkx.Graph(graph), undirected and simple")
    world_size = graph.number_of_nodes()
    if set(graph.nodes) != set(range(world_size)):
        raise ValueError(
            f"the graph's {world_size} nodes are not the ranks 0 to {world_size - 1}: "
            "networkx.convert_node_labels_to_integers(graph) numbers them"
        )
    edges = sorted((min(edge), max(edge)) for edge in graph.edges())
    if loops := [u for u, v in edges if u == v]:
        raise ValueError(
            f"node {loops[0]} has an edge to itself: a rank keeps its own value anyway, remove it"
        )
    return GivenSchedule(
        name="graph", world_size=world_size, partners=_partners(world_size, edges, seed)
    )


def from_matrix(weights: np.ndarray, *, seed: int = 0) -> GivenSchedule:
    r"""Return a schedule from a matrix of mixing weights, such as Metropolis-Hastings weights.

    Ranks $i$ and $j$ meet once a period if $W_{ij} > 0$ and then take $W_{ij}$ of the delta. The
    edges are coloured into matchings like those of `from_graph`.

    Symmetric: a void exchange counts on neither end, so the mean survives late and dead ranks.

    Args:
        weights: shape `(world_size, world_size)`, symmetric, non-negative, rows summing to 1
            (to 1e-6).
        seed: picks among the colourings, 0 to 2**64 - 1; the same on all ranks.

    Returns:
        The schedule; its `weight` answers from the matrix and ignores the default.

    Raises:
        ValueError: when the matrix is not square, symmetric, non-negative and doubly stochastic,
            with the entry or the row that fails; or when its graph is not connected.

    Example:
        >>> schedule = from_matrix(np.array([[0.7, 0.3], [0.3, 0.7]]))
        >>> schedule.weight(round=0, rank=1)
        0.3

    References:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
        arXiv:1705.09056, algorithm 1, line 5: $x_i \leftarrow \sum_j W_{ij} x_j$.

        Deviations: 1. the matrix is applied edge by edge over one period, not at once, so that a
        rank meets one partner a round. The mean is kept alike, but the product over a period is
        $W$ only to first order in the weights, and one step of the paper takes `period` rounds.
    """
    check_seed(seed)
    matrix = np.asarray(weights, dtype=np.float64)
    _check_mixing_matrix(matrix)
    matrix = (matrix + matrix.T) / 2
    world_size = matrix.shape[0]
    upper = np.argwhere(np.triu(matrix, k=1) > 0.0)
    partners = _partners(world_size, [(int(u), int(v)) for u, v in upper], seed)
    pair_weights = tuple(
        tuple(0.0 if met == NOBODY else float(matrix[rank, met]) for rank, met in enumerate(row))
        for row in partners
    )
    return GivenSchedule(
        name="matrix", world_size=world_size, partners=partners, weights=pair_weights
    )


def _partners(world_size: int, edges: Sequence[Edge], seed: int) -> tuple[tuple[int, ...], ...]:
    _check_connected(world_size, edges)
    shuffled = [edges[i] for i in relabelling(len(edges), seed, 0).rank_at.tolist()]
    rows = []
    for matching in colour_edges(world_size, shuffled) or [[]]:
        row = [NOBODY] * world_size
        for u, v in matching:
            row[u], row[v] = v, u
        rows.append(tuple(row))
    return tuple(rows)


def _check_connected(world_size: int, edges: Iterable[Edge]) -> None:
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(world_size))
    graph.add_edges_from(edges)
    parts = sorted(sorted(part) for part in networkx.connected_components(graph))
    if len(parts) > 1:
        shown = "; ".join(_abridged(part) for part in parts[:4])
        raise ValueError(
            f"the graph falls apart into {len(parts)} components that would never mix, "
            f"ranks {shown}{'; ...' if len(parts) > 4 else ''}: add edges between them"
        )


def _abridged(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _check_mixing_matrix(matrix: np.ndarray) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(
            f"a matrix of mixing weights has one row and one column for each rank, "
            f"got shape {matrix.shape}"
        )
    wrong = np.argwhere(~np.isfinite(matrix) | (matrix < 0.0))
    if wrong.size:
        i, j = wrong[0].tolist()
        raise ValueError(
            f"weight {matrix[i, j]} between ranks {i} and {j}: weights are finite and not negative"
        )
    sums = matrix.sum(axis=1)
    wrong = np.argwhere(np.abs(sums - 1.0) > _TOLERANCE)
    if wrong.size:
        i = int(wrong[0, 0])
        raise ValueError(
            f"row {i} of the weights sums to {sums[i]:.6g}, not to 1, so the mean would not be "
            "kept: give the rest to the diagonal"
        )
    wrong = np.argwhere(np.abs(matrix - matrix.T) > _TOLERANCE)
    if wrong.size:
        i, j = wrong[0].tolist()
        raise ValueError(
            f"weights {matrix[i, j]:.6g} from rank {j} to {i} and {matrix[j, i]:.6g} back differ: "
            "both ends of a pair take the same share, make the matrix symmetric"
        )
