"""Checks of a backbone's graph, and the graph as a schedule of rounds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from gossipgrad.muon._backbones import BACKBONES, ROTATING
from gossipgrad.topology import Schedule, by_name, from_graph, from_matrix, repeated, ring

__all__ = ["Graph", "resolve_graph"]

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Graph:
    """The partners of a rank, and the rounds of an exchange.

    Attributes:
        schedule: One partner per round.
        rounds: Rounds of one exchange: 1 with rotating partners, else as many as cover the graph.
        block: A step begins at a round that is a multiple of it; the step then has one partner.
        weights: The matrix of weights of all exchanges; None with rotating partners.
    """

    schedule: Schedule
    rounds: int
    block: int
    weights: np.ndarray | None

    def matrix(self, step: int) -> Float[np.ndarray, "rank rank"]:
        """`W` of all exchanges of a step."""
        if self.weights is not None:
            return self.weights
        return self.schedule.mixing_matrix(step * self.block)


def resolve_graph(
    topology: Any,
    world_size: int,
    backbone: str,
    *,
    lazy: bool,
    exchanges: int,
    seed: int,
) -> Graph:
    """Return the graph, if the backbone is safe on it.

    Args:
        topology: A name, a schedule, a networkx graph, or a matrix of weights.
        world_size: Number of ranks.
        backbone: The backbone.
        lazy: Whether `(I + W) / 2` replaces `W`.
        exchanges: Number of exchanges in a step; all are with the same partner.
        seed: Seed of rotating partners.

    Raises:
        ValueError: It is invalid, is for another number of ranks, or the backbone would diverge on
            it; the message has the eigenvalue, the rule, and two settings that work.
    """
    schedule = _schedule_of(topology, world_size, seed)
    if schedule.world_size != world_size:
        raise ValueError(
            f"topology {topology} is for {schedule.world_size} ranks, the group has {world_size}: "
            f"make it for {world_size}"
        )
    if not _stays(schedule) and world_size > 2:
        if backbone not in ROTATING:
            raise ValueError(
                f"backbone={backbone!r} diverges where partners rotate, as with topology "
                f"{schedule.name!r}: it subtracts the step before, which went over other links. "
                "Use backbone='semi-atc-gt', or topology='ring', whose weights stay the same"
            )
        share = 0.5 if lazy else 1.0
        return Graph(repeated(schedule, exchanges, share=share), 1, exchanges, None)
    weights = _weights_of(schedule)
    if lazy:
        weights = (np.eye(world_size) + weights) / 2
    _check(weights, backbone)
    fixed = from_matrix(weights)
    return Graph(fixed, fixed.period, 1, weights)


def _schedule_of(topology: Any, world_size: int, seed: int) -> Schedule:
    if isinstance(topology, Schedule):
        return topology
    if isinstance(topology, str):
        return ring(world_size) if topology == "ring" else by_name(topology, world_size, seed=seed)
    if hasattr(topology, "nodes"):
        return from_graph(topology)
    matrix = np.asarray(topology, dtype=np.float64)
    if matrix.ndim != 2:
        raise ValueError(
            f"topology={topology!r} must be a name, a schedule from gossipgrad.topology, a "
            "networkx graph, or a matrix of weights"
        )
    return from_matrix(matrix)


def _stays(schedule: Schedule) -> bool:
    """Whether the matchings of its period together form one graph."""
    if schedule.name in ("graph", "matrix"):
        return True
    return schedule.name == "ring" and not schedule.describe()["rotate"]


def _weights_of(schedule: Schedule) -> Float[np.ndarray, "rank rank"]:
    """Return the matrix of all matchings together."""
    # A graph has `W_ij = 1 / (2 max(d_i, d_j))`, so that no eigenvalue is negative: 1/4 on a ring.
    n = schedule.world_size
    weights = np.zeros((n, n))
    for round in range(schedule.period):
        peers = schedule.round_peers(round).recv_from
        taken = schedule.round_weights(round)
        for rank in np.flatnonzero(peers >= 0):
            weights[rank, peers[rank]] = taken[rank] if schedule.name == "matrix" else 1.0
    if schedule.name != "matrix":
        degree = (weights > 0).sum(1)
        weights /= 2 * np.maximum(1, np.maximum(degree[:, None], degree[None, :]))
    return weights + np.diag(1 - weights.sum(1))


def _check(weights: Float[np.ndarray, "rank rank"], backbone: str) -> None:
    """Raise `ValueError` if the backbone would diverge, or not reach a consensus."""
    rule = BACKBONES[backbone]
    others = np.linalg.eigvalsh(weights)[:-1].tolist()
    if weights.diagonal().min() < -_ROUNDING:
        rank = int(weights.diagonal().argmin())
        raise ValueError(
            f"rank {rank} gives {1 - weights[rank, rank]:g} of its weight away, more than 1: give "
            "smaller weights, or lazy=True"
        )
    worst = max(others, key=rule.radius, default=0.0)
    if not others or rule.radius(worst) < 1 - _ROUNDING:
        return
    needs = "roots of z^2 - (1 - b^2 + ac) z + ac < 1"
    if backbone in ("ed", "extra"):
        needs = "every eigenvalue above -1/3"
    lazily = max(rule.radius((1 + each) / 2) for each in others) < 1 - _ROUNDING
    ways = ["lazy=True, which takes (I + W) / 2"] * lazily
    ways += [
        f"backbone={name!r}"
        for name in ("semi-atc-gt", "demuon")
        if max(map(BACKBONES[name].radius, others)) < 1 - _ROUNDING
    ]
    ways += [
        "topology='ring', whose eigenvalues are 0 to 1",
        "topology='matching' with semi-atc-gt",
    ]
    raise ValueError(
        f"backbone={backbone!r} needs {needs}, and these weights have the eigenvalue {worst:.4g}: "
        f"disagreements would grow by {rule.radius(worst):.4g} a step. Use {ways[0]}, or {ways[1]}"
    )
