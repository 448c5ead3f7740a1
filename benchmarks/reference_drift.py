"""How far replicas drift apart, and what each mixing rule costs in loss, by the reference.

Trains a small net on digits with `gossipgrad.decentralized._reference`, all ranks
in this process, and writes:

* `consensus_distance`: RMS over ranks of the L2 distance to the mean model after given steps, for
  every payload and mode and for no communication at all;
* `loss`: the training loss (mean over ranks, over all rows) after `loss_step` steps, with the
  paired differences to `sync`: same seed, same initial weights, same batches.

    python -m benchmarks.reference_drift    # under five minutes on one core
"""

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import write
from gossipgrad.data import load_digits
from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import dissemination

BATCH_ROWS, LEARNING_RATE, MOMENTUM = 16, 0.05, 0.9
TRAIN_ROWS = 1440
WORLD_SIZES, AT_STEPS = (4, 8), (50, 200, 800, 2000)
LOSS_STEP, LOSS_SEEDS = 50, range(5)
STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "overlap": {"mode": "overlap"},
    "overlap, weights+state": {"mode": "overlap", "payload": "weights+state"},
    "lagged": {"mode": "lagged"},
    "lagged, weights+state": {"mode": "lagged", "payload": "weights+state"},
    "gradients": {"payload": "gradients"},
    "gradients+weights": {"payload": "gradients+weights"},
    "local": {"every": 2**62},  # its first round never closes
}
LOSS_STRATEGIES = ("sync", "overlap", "overlap, weights+state", "lagged", "lagged, weights+state")


class Run:
    """One strategy on p ranks: equal initial weights, a shard of its own for each rank."""

    def __init__(self, rows: tuple[Tensor, Tensor], way: str, world_size: int, seed: int) -> None:
        self.inputs, self.labels = rows
        self.models: list[nn.Module] = []
        for _ in range(world_size):
            torch.manual_seed(seed)
            hidden = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
            self.models.append(nn.Sequential(*hidden, nn.Linear(32, 10)))
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
            for model in self.models
        ]
        schedule = dissemination(world_size, seed=seed)
        self.reference = Reference(self.models, optimizers, schedule, **STRATEGIES[way])
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.labels), generator=self.generator)
        self.shards = order.tensor_split(world_size)

    def step(self) -> None:
        for model, shard in zip(self.models, self.shards, strict=True):
            rows = shard[torch.randint(len(shard), (BATCH_ROWS,), generator=self.generator)]
            model.zero_grad()
            F.cross_entropy(model(self.inputs[rows]), self.labels[rows]).backward()
        self.reference.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Mean over ranks, over all rows."""
        losses = [F.cross_entropy(m(self.inputs), self.labels).item() for m in self.models]
        return statistics.fmean(losses)


def drift(rows: tuple[Tensor, Tensor], world_size: int, steps: int) -> list[dict]:
    """Consensus distance at the given steps, by strategy."""
    results = []
    for way in STRATEGIES:
        run = Run(rows, way, world_size, 0)
        distances = {}
        for step in range(1, steps + 1):
            run.step()
            if step in AT_STEPS:
                distances[str(step)] = run.reference.consensus_distance()
        row = {"world_size": world_size, "strategy": way, "seed": 0}
        results.append({**row, "consensus_distance": distances, "loss_of_replicas": run.loss()})
        print(results[-1], flush=True)
    return results


def losses(rows: tuple[Tensor, Tensor], world_size: int) -> list[dict]:
    """Loss over the seeds, and its paired differences to sync."""
    found: dict[str, list[float]] = {}
    results = []
    for way in LOSS_STRATEGIES:
        found[way] = []
        for seed in LOSS_SEEDS:
            run = Run(rows, way, world_size, seed)
            for _ in range(LOSS_STEP):
                run.step()
            found[way].append(run.loss())
        differences = [v - s for v, s in zip(found[way], found["sync"], strict=True)]
        results.append(
            {
                "world_size": world_size,
                "strategy": way,
                "losses": found[way],
                "mean": statistics.fmean(found[way]),
                "standard_deviation": statistics.stdev(found[way]),
                "minus_sync_mean": statistics.fmean(differences),
                "minus_sync_standard_deviation": statistics.stdev(differences),
            }
        )
        print(results[-1], flush=True)
    return results


def main() -> None:
    """Trains, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=AT_STEPS[-1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs, labels = load_digits()
    train = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[:TRAIN_ROWS]
    rows = inputs[train], labels[train]
    figures: dict[str, Any] = {
        "setting": {
            "data": "digits, 1440 rows to train on, one shard a rank",
            "model": "64-64-32-10 MLP, ReLU",
            "optimizer": f"SGD, lr {LEARNING_RATE}, momentum {MOMENTUM}",
            "batch_rows_per_rank": BATCH_ROWS,
            "topology": "dissemination, rotating",
            "loss_step": LOSS_STEP,
            "loss_seeds": list(LOSS_SEEDS),
        },
        "consensus_distance": [],
        "loss": [],
    }
    for world_size in WORLD_SIZES:
        figures["consensus_distance"] += drift(rows, world_size, options.steps)
        figures["loss"] += losses(rows, world_size)
    print(write("reference_drift", figures))


if __name__ == "__main__":
    main()
