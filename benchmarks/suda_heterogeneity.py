"""Decentralized Muon where ranks have few classes each: which backbone is ahead, and of what?

Fashion-MNIST, a perceptron with two hidden layers of 32 (26,506 parameters), the classes of each
rank drawn from a Dirichlet distribution (0.05: mostly one or two), a ring of virtual ranks. `ed`,
`atc-gt`, `semi-atc-gt` and `demuon` mix with both neighbours in each exchange; `gossip SGD`
(momentum 0.9) and `gossip AdamW` meet one neighbour a step; `all-reduce Muon` is
`demuon` with the mean of all ranks as its exchange.
Each has its learning rate, constant, from three to five that lie a factor of 3 apart, by the first
seed's accuracy; the other seeds run with that one alone. What is evaluated is the mean of all
replicas.

Cells that are done are kept in the results, and not run again.

    python -m benchmarks.suda_heterogeneity --ranks 10 --steps 200
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._common import RESULTS, write
from gossipgrad import data
from gossipgrad.models import MLP
from gossipgrad.simulate import SudaRanks, VirtualRanks

ALPHA = 0.05
BATCH = 32
SEEDS = (0, 1, 2)
Make = Callable[[MLP, int, float], Any]


def suda(backbone: str, topology: Any = "ring") -> Make:
    """Muon of the paper: an average of gradients, no look ahead."""

    def make(model: MLP, ranks: int, lr: float) -> SudaRanks:
        graph = np.full((ranks, ranks), 1 / ranks) if topology == "all" else topology
        return SudaRanks(
            model,
            ranks,
            backbone=backbone,
            topology=graph,
            lr=lr,
            momentum=0.9,
            nesterov=False,
            momentum_form="ema",
        )

    return make


def gossip(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    """One neighbour a step."""

    def make(model: MLP, ranks: int, lr: float) -> VirtualRanks:
        return VirtualRanks(
            model,
            ranks,
            optimizer=lambda parameters: optimizer(parameters, lr=lr, **options),
            topology="ring",
        )

    return make


MUON, SGD = (0.006, 0.02, 0.06), (0.003, 0.01, 0.03, 0.1, 0.3)
ADAMW = (1e-3, 3e-3, 1e-2, 3e-2)
WAYS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "ed": (suda("ed"), MUON),
    "atc-gt": (suda("atc-gt"), MUON),
    "semi-atc-gt": (suda("semi-atc-gt"), MUON),
    "demuon": (suda("demuon"), MUON),
    "all-reduce Muon": (suda("demuon", "all"), MUON),
    "gossip SGD": (gossip(torch.optim.SGD, momentum=0.9), SGD),
    "gossip AdamW": (gossip(torch.optim.AdamW), ADAMW),
}


def shares(labels: Tensor, ranks: int, seed: int) -> list[Tensor]:
    """The samples of each rank: of every class a Dirichlet share."""
    random = np.random.default_rng(seed)
    held: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for label in range(10):
        places = random.permutation(np.flatnonzero(labels.numpy() == label))
        cuts = np.cumsum(random.dirichlet([ALPHA] * ranks))[:-1] * len(places)
        for rank, part in enumerate(np.split(places, cuts.astype(int))):
            held[rank].append(part)
    found = [torch.from_numpy(np.concatenate(each)) for each in held]
    return [
        each if len(each) >= BATCH else torch.arange(BATCH) + rank
        for rank, each in enumerate(found)
    ]


def train(
    make: Make,
    lr: float,
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    ranks: int,
    steps: int,
    seed: int,
) -> dict:
    """Accuracy of the consensus in percent, its loss, and the distance of ranks to it."""
    x, y, x_test, y_test = parts
    torch.manual_seed(seed)
    virtual = make(MLP(784, 10, hidden_size=32), ranks, lr)
    held = shares(y, ranks, seed)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(steps):
        chosen = torch.stack(
            [each[torch.randint(len(each), (BATCH,), generator=generator)] for each in held]
        )
        virtual.step(x[chosen], y[chosen])
    model = virtual.consensus_model()
    with torch.no_grad():
        logits = model(x_test)
    distance = virtual.consensus_distance()
    return {
        "lr": lr,
        "seed": seed,
        "accuracy": 100 * (logits.argmax(1) == y_test).double().mean().item(),
        "loss": torch.nn.functional.cross_entropy(logits, y_test).item(),
        "distance": distance if math.isfinite(distance) else None,
        "seconds": time.perf_counter() - start,
    }


def tensors_of(samples: Any) -> tuple[Tensor, Tensor]:
    """All images, flat, and their labels."""
    x, y = samples.batch(torch.arange(len(samples)))
    return x.flatten(1), y


def main() -> None:
    """Fills the cells of one size, and writes `results/suda_heterogeneity.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    path = RESULTS / "suda_heterogeneity.json"
    cells = json.loads(path.read_text())["cells"] if path.exists() else {}
    held = cells.setdefault(f"{options.ranks} ranks, {options.steps} steps", {})
    loaded = data.load("fashion-mnist")
    parts = (*tensors_of(loaded.train), *tensors_of(loaded.test))
    for seed in SEEDS:
        for name, (make, rates) in WAYS.items():
            done = held.setdefault(name, [])
            first = [one for one in done if one["seed"] == SEEDS[0]]
            best = max(first, key=lambda one: one["accuracy"])["lr"] if first else None
            for lr in rates if seed == SEEDS[0] else (best,):
                if any(one["lr"] == lr and one["seed"] == seed for one in done):
                    continue
                if time.monotonic() > end or lr is None:
                    return
                done.append(train(make, lr, parts, options.ranks, options.steps, seed))
                print(f"{name:16} {done[-1]}", flush=True)
                write("suda_heterogeneity", {"alpha": ALPHA, "batch": BATCH, "cells": cells})
    for name, done in held.items():
        best = max((one for one in done if one["seed"] == 0), key=lambda one: one["accuracy"])["lr"]
        found = [one["accuracy"] for one in done if one["lr"] == best]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{name:16} lr {best:g}: {statistics.mean(found):.2f} +- {spread:.2f} %")


if __name__ == "__main__":
    main()
