"""What does bounded staleness cost? Accuracy and consensus distance against `max_staleness`.

Eight virtual ranks train an MLP on Fashion-MNIST in mode stale, with `max_staleness` from 0 to 8:
once with every exchange as late as it allows, once with every exchange in time, which shows what
the smaller weight alone costs. The same samples, seeds and initial weights for all. A cell that is
done is kept between calls. Beside it, how often ranks of unequal pace come to mix at all.

    python -m benchmarks.staleness
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks._common import write
from benchmarks._stale_pace import JITTER, pace_rows
from gossipgrad import Stale, data, models
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import matching
from gossipgrad.train._summary import write_json

WORLD_SIZE = 8
BATCH_SIZE = 64
EPOCHS = 6
LEARNING_RATE = 0.05
MOMENTUM = 0.9
STALENESS = tuple(range(9))
DISTANCE_EVERY = 20  # steps


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        contestant: "allreduce", "overlap", "stale, late" or "stale, in time".
        max_staleness: Of mode stale, None for the others.
        seed: Of initial weights, samples and partners.
    """

    contestant: str
    max_staleness: int | None
    seed: int

    @property
    def name(self) -> str:
        parts = [self.contestant.replace(", ", "-").replace(" ", "-"), self.max_staleness]
        return "-".join(str(part) for part in (*parts, self.seed) if part is not None)

    @property
    def settings(self) -> dict:
        """What virtual ranks are told."""
        if self.contestant == "allreduce":
            return {"strategy": "allreduce"}
        topology = matching(WORLD_SIZE, seed=self.seed)
        if self.max_staleness is None:
            return {"topology": topology}
        delay = self.max_staleness if self.contestant == "stale, late" else 0
        mode = Stale(max_staleness=self.max_staleness)
        return {"topology": topology, "mode": mode, "delay": delay}


def cells(seeds: int) -> list[Cell]:
    """Every cell, seed by seed."""
    contestants = [("allreduce", None), ("overlap", None)]
    contestants += [("stale, late", d) for d in STALENESS]
    contestants += [("stale, in time", d) for d in STALENESS]
    return [Cell(name, d, seed) for seed in range(seeds) for name, d in contestants]


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return int((model.eval()(x).argmax(1) == y).sum()) / len(y)


def run(cell: Cell, folder: Path, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
    """The figures of one cell; from disk if it was done before."""
    done = folder / f"{cell.name}.json"
    if done.exists():
        return json.loads(done.read_text())
    (x, y), test = parts
    torch.manual_seed(cell.seed)
    ranks = VirtualRanks(
        models.build("mlp", data.info("fashion-mnist")),
        WORLD_SIZE,
        optimizer=lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=MOMENTUM),
        **cell.settings,
    )
    start = time.perf_counter()
    step_samples = WORLD_SIZE * BATCH_SIZE
    steps = len(y) // step_samples
    distances: list[float] = []
    for epoch in range(EPOCHS):
        order = np.random.default_rng((cell.seed, epoch)).permutation(len(y))[
            : steps * step_samples
        ]
        for chosen in torch.from_numpy(order).view(steps, WORLD_SIZE, BATCH_SIZE):
            rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * ranks.steps / (EPOCHS * steps)))
            ranks.optimizer.param_groups[0]["lr"] = rate
            ranks.step(x[chosen], y[chosen])
            if ranks.steps % DISTANCE_EVERY == 0:
                distances.append(ranks.consensus_distance())
    replicas = [accuracy(ranks.replica(rank), *test) for rank in range(WORLD_SIZE)]
    figures = {
        **asdict(cell),
        "accuracy": accuracy(ranks.consensus_model(), *test),
        "replica_accuracy": statistics.fmean(replicas),
        "mean_distance": statistics.fmean(distances),
        "largest_distance": max(distances),
        "seconds": time.perf_counter() - start,
    }
    done.parent.mkdir(parents=True, exist_ok=True)
    write_json(done, figures)
    return figures


def table(results: list[dict]) -> list[dict]:
    """One row a contestant and staleness: means over the seeds, and how far these are apart."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        groups.setdefault((result["contestant"], result["max_staleness"]), []).append(result)
    rows = []
    for (contestant, d), found in groups.items():
        means = {
            name: round(statistics.fmean(r[name] for r in found), 5)
            for name in ("accuracy", "replica_accuracy", "mean_distance", "largest_distance")
        }
        rows.append(
            {
                "contestant": contestant,
                "max_staleness": d,
                "weight": None if d is None else round(Stale(max_staleness=d).weight, 4),
                **means,
                "accuracies": [r["accuracy"] for r in found],
                "seeds": [r["seed"] for r in found],
            }
        )
    return rows


def begin(description: str, folder: Path) -> tuple[argparse.Namespace, list]:
    """What the command line asks for, and Fashion-MNIST: all to train on, all to test with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=folder)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = data.load("fashion-mnist")
    return options, [part.batch(torch.arange(len(part))) for part in (dataset.train, dataset.test)]


def main() -> None:
    """Runs what is missing and writes the table."""
    options, parts = begin(__doc__.split("\n")[0], Path("runs/staleness"))
    results = []
    for cell in cells(options.seeds):
        results.append(run(cell, options.folder, parts))
        print(cell.name, {k: v for k, v in results[-1].items() if isinstance(v, float)}, flush=True)
    setting = {
        "data": "fashion-mnist",
        "model": "mlp",
        "world_size": WORLD_SIZE,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "learning_rate": f"{LEARNING_RATE}, cosine to 0",
        "momentum": MOMENTUM,
        "topology": "matching",
    }
    figures = {
        "setting": setting,
        "rows": table(results),
        "pace_setting": f"steps of length 1, log-normal with sigma {JITTER}; nothing is trained",
        "pace": pace_rows(),
    }
    print(write("staleness", figures))


if __name__ == "__main__":
    main()
