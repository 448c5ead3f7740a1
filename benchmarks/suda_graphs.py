"""Which backbones of decentralized Muon converge on which graphs, and which gg.suda refuses.

Eight ranks with quadratics far apart, f_i(X) = 1/2 tr (X - T_i)' A_i (X - T_i) on 8 x 5 matrices,
exact polar factors, momentum 0.9, step size 0.3 / (k + 1)^0.75; the sum starts at a nuclear norm of
the gradient of 21. The rules are run beside the guard, by the reference, whether it lets them
through or not. A cell has what the guard says, the nuclear norm of the gradient of the mean
function at the mean of ranks, averaged over the last 100 steps, and the distance of ranks to their
mean.

    python -m benchmarks.suda_graphs
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import networkx
import numpy as np
import torch

from benchmarks._common import write
from gossipgrad import topology
from gossipgrad.muon import resolve_settings
from gossipgrad.muon._reference import NAMES, Reference

N = 8
SHIFT = np.roll(np.eye(N), 1, axis=1)


def ring(weight: float) -> np.ndarray:
    """Each neighbour has this weight."""
    return weight * (SHIFT + SHIFT.T) + (1 - 2 * weight) * np.eye(N)


GRAPHS: dict[str, tuple[Any, bool]] = {
    "ring, 1/4": ("ring", False),
    "ring, 1/3": (ring(1 / 3), False),
    "ring, 0.45": (ring(0.45), False),
    "ring, 0.45, lazy": (ring(0.45), True),
    "line": (networkx.path_graph(N), False),
    "star": (networkx.star_graph(N - 1), False),
    "complete at once": (np.full((N, N), 1 / N), False),
    "dissemination": (topology.dissemination(N), False),
    "dissemination, no relabelling": (topology.dissemination(N, rotate=False), False),
    "dissemination, lazy": (topology.dissemination(N), True),
    "hypercube": (topology.hypercube(N), False),
    "matching": (topology.matching(N), False),
    "complete in turns": (topology.complete(N), False),
}
"""What is passed as `topology`, and `lazy`."""


def matrices(of: Any, lazy: bool) -> Callable[[int], torch.Tensor]:
    """`W` of step k, whether a backbone may run on it or not."""
    graph = resolve_settings(N, backbone="demuon", topology=of, lazy=lazy).graph
    return functools.cache(lambda k: torch.from_numpy(graph.matrix(k)))


def refusal(backbone: str, of: Any, lazy: bool) -> str | None:
    """What gg.suda says to it; None if it begins."""
    try:
        resolve_settings(N, backbone=backbone, topology=of, lazy=lazy)
    except ValueError as error:
        return str(error)
    return None


def run(backbone: str, weights: Callable[[int], torch.Tensor], steps: int) -> dict:
    """Slope and distance at the end; None where weights grow without bound."""
    generator = torch.Generator().manual_seed(1)
    options = {"generator": generator, "dtype": torch.float64}
    goals = 3 * torch.randn(N, 8, 5, **options)
    q = torch.randn(N, 8, 8, **options)
    a = q @ q.mT / 8 + 0.1 * torch.eye(8, dtype=torch.float64)
    x = torch.zeros(N, 8, 5, dtype=torch.float64)
    reference, slopes = Reference(backbone, x, b=0.9), []
    for k in range(steps):
        x = reference.step(a @ (x - goals), 0.3 / (1 + k) ** 0.75, weights(k))
        if not x.abs().max() < 1e6:
            return {"slope": None, "distance": None, "diverged_at": k}
        if k >= steps - 100:
            mean = (a @ (x.mean(0) - goals)).mean(0)
            slopes.append(torch.linalg.matrix_norm(mean, "nuc").item())
    distance = (x - x.mean(0)).flatten(1).norm(dim=1).square().mean().sqrt().item()
    return {"slope": sum(slopes) / len(slopes), "distance": distance}


def main() -> None:
    """Fills the table, and writes `results/suda_graphs.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[str, dict[str, dict]] = {}
    for graph, (of, lazy) in GRAPHS.items():
        weights = matrices(of, lazy)
        for backbone in NAMES:
            cell = run(backbone, weights, options.steps)
            cell["refused"] = refusal(backbone, of, lazy)
            cells.setdefault(graph, {})[backbone] = cell
            slope = "diverges" if cell["slope"] is None else f"{cell['slope']:.1e}"
            print(f"{graph:30} {backbone:12} {slope:9} {'refused' if cell['refused'] else ''}")
        write("suda_graphs", {"steps": options.steps, "cells": cells})
    wrong = [
        (graph, backbone)
        for graph, row in cells.items()
        for backbone, cell in row.items()
        if cell["refused"] is None and not (cell["slope"] or math.inf) < 0.5
    ]
    print(f"let through, and not at rest: {wrong or 'none'}")


if __name__ == "__main__":
    main()
