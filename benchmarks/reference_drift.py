"""How far replicas drift apart, and what each mixing rule costs in loss, by the reference.

Trains a small net on scikit-learn's digits with `gossipgrad.decentralized._reference`, all ranks
in this process, and writes:

* `consensus_distance`: RMS over ranks of the L2 distance to the mean model after given steps, for
  every payload and mode and for no communication at all;
* `loss`: the training loss (mean over ranks, over all rows) after `loss_step` steps, with the
  paired differences to `sync`: same seed, same initial weights, same batches.

Run from the repository root, under five minutes on one core:

    python -m benchmarks.reference_drift
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import write
from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import dissemination

BATCH_ROWS = 16
LEARNING_RATE = 0.05
MOMENTUM = 0.9
STRATEGIES = {
    "sync": {"mode": "sync"},
    "overlap": {"mode": "overlap"},
    "overlap, weights+state": {"mode": "overlap", "payload": "weights+state"},
    "lagged": {"mode": "lagged"},
    "lagged, weights+state": {"mode": "lagged", "payload": "weights+state"},
    "gradients": {"payload": "gradients"},
    "gradients+weights": {"payload": "gradients+weights"},
    "local": {"every": 2**62},  # its first round never closes
}
LOSS_STRATEGIES = ["sync", "overlap", "overlap, weights+state", "lagged", "lagged, weights+state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """Rows to train on and rows held out."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def load() -> Digits:
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return Digits(
        inputs=inputs[train],
        labels=labels[train],
        test_inputs=inputs[test],
        test_labels=labels[test],
    )


class Run:
    """One strategy on p ranks: equal initial weights, a shard of its own for each rank."""

    def __init__(self, digits: Digits, strategy: str, world_size: int, seed: int) -> None:
        self.digits = digits
        self.models: list[nn.Module] = []
        for _ in range(world_size):
            torch.manual_seed(seed)
            self.models.append(
                nn.Sequential(
                    nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
                )
            )
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
            for model in self.models
        ]
        schedule = dissemination(world_size, seed=seed)
        self.reference = Reference(self.models, optimizers, schedule, **STRATEGIES[strategy])
        self.generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(digits.labels), generator=self.generator)
        self.shards = rows.tensor_split(world_size)

    def step(self) -> None:
        for model, shard in zip(self.models, self.shards, strict=True):
            chosen = torch.randint(len(shard), (BATCH_ROWS,), generator=self.generator)
            rows = shard[chosen]
            model.zero_grad()
            F.cross_entropy(model(self.digits.inputs[rows]), self.digits.labels[rows]).backward()
        self.reference.step()

    @torch.no_grad()
    def loss(self) -> float:
        losses = [
            F.cross_entropy(model(self.digits.inputs), self.digits.labels).item()
            for model in self.models
        ]
        return statistics.fmean(losses)

    @torch.no_grad()
    def consensus_accuracy(self) -> float:
        names = [name for name, _ in self.models[0].named_parameters()]
        mean = dict(zip(names, (w.float() for w in self.reference.consensus()), strict=True))
        scores = torch.func.functional_call(self.models[0], mean, (self.digits.test_inputs,))
        return (scores.argmax(1) == self.digits.test_labels).double().mean().item()


def drift(digits: Digits, world_size: int, rounds: int, at: list[int], seed: int) -> list[dict]:
    """Consensus distance at the given steps, and where the mean model got to, per strategy."""
    results = []
    for strategy in STRATEGIES:
        run = Run(digits, strategy, world_size, seed)
        distances = {}
        for step in range(1, rounds + 1):
            run.step()
            if step in at:
                distances[str(step)] = run.reference.consensus_distance()
        results.append(
            {
                "world_size": world_size,
                "strategy": strategy,
                "seed": seed,
                "consensus_distance": distances,
                "accuracy_of_consensus": run.consensus_accuracy(),
                "loss_of_replicas": run.loss(),
            }
        )
        row = "  ".join(f"{distance:8.4f}" for distance in distances.values())
        print(f"p={world_size}  {strategy:24s} {row}", flush=True)
    return results


def losses(digits: Digits, world_size: int, step: int, seeds: list[int]) -> list[dict]:
    """Loss after `step` steps over the seeds, and its paired differences to sync."""
    by_strategy: dict[str, list[float]] = {}
    for strategy in LOSS_STRATEGIES:
        by_strategy[strategy] = []
        for seed in seeds:
            run = Run(digits, strategy, world_size, seed)
            for _ in range(step):
                run.step()
            by_strategy[strategy].append(run.loss())
    results = []
    for strategy, values in by_strategy.items():
        differences = [v - s for v, s in zip(values, by_strategy["sync"], strict=True)]
        result = {
            "world_size": world_size,
            "strategy": strategy,
            "losses": values,
            "mean": statistics.fmean(values),
            "standard_deviation": statistics.stdev(values),
            "minus_sync": differences,
            "minus_sync_mean": statistics.fmean(differences),
            "minus_sync_standard_deviation": statistics.stdev(differences),
        }
        results.append(result)
        print(
            f"p={world_size}  {strategy:24s} loss {result['mean']:.4f} "
            f"(sd {result['standard_deviation']:.4f}), minus sync "
            f"{result['minus_sync_mean']:+.4f} (sd {result['minus_sync_standard_deviation']:.4f})",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Drift and loss of each mixing rule.")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--drift-seed", type=int, default=0)
    parser.add_argument("--loss-step", type=int, default=50)
    parser.add_argument("--loss-seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    if len(options.loss_seeds) < 2:
        parser.error("--loss-seeds: give two or more, a spread needs them")

    torch.set_num_threads(1)
    start_seconds = time.perf_counter()
    digits = load()
    at = [step for step in (50, 200, 800, 2000) if step <= options.rounds]
    drifts: list[dict] = []
    loss: list[dict] = []
    for world_size in options.world_sizes:
        drifts += drift(digits, world_size, options.rounds, at, options.drift_seed)
        loss += losses(digits, world_size, options.loss_step, options.loss_seeds)
    figures = {
        "setting": {
            "data": "scikit-learn digits, 1440 rows to train on, 357 held out, one shard a rank",
            "model": "64-64-32-10 MLP, ReLU",
            "optimizer": f"SGD, lr {LEARNING_RATE}, momentum {MOMENTUM}",
            "batch_rows_per_rank": BATCH_ROWS,
            "topology": "dissemination, rotating",
            "drift_seed": options.drift_seed,
            "loss_step": options.loss_step,
            "loss_seeds": options.loss_seeds,
        },
        "seconds": round(time.perf_counter() - start_seconds, 1),
        "consensus_distance": drifts,
        "loss": loss,
    }
    print(write("reference_drift", figures))


if __name__ == "__main__":
    main()
