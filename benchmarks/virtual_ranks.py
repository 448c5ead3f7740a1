"""Does gossip keep all-reduce's accuracy at 128 workers? Measured with virtual ranks.

An MLP on Fashion-MNIST in one process with `gossipgrad.simulate.VirtualRanks`. All cells see the
same samples in the same steps: the global batch, the epochs and the learning rate are one for all
strategies and world sizes, and each rank takes its share of the batch. A cell that is done is kept.

    python -m benchmarks.virtual_ranks
    python -m benchmarks.virtual_ranks --only 128/gossip --seeds 1
"""

import argparse
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._common import once, write
from benchmarks._tasks import Part, accuracy, cosine, whole
from gossipgrad import data, models
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import by_name

STRATEGIES: dict[str, dict] = {
    "allreduce": {"strategy": "allreduce"},
    "gossip": {},
    "gossip, no rotation": {"rotate": False},
    "gossip, state": {"payload": "weights+state"},
    "every-log-p": {"strategy": "every-log-p"},
    "local": {"strategy": "local"},
}
GLOBAL_BATCH, EPOCHS, PEAK_LR, MOMENTUM, SEEDS = 2048, 20, 0.1, 0.9, 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    world_size: int
    strategy: str
    seed: int
    epochs_factor: int = 1

    @property
    def name(self) -> str:
        """Which names its file."""
        longer = "" if self.epochs_factor == 1 else f"-epochs-x{self.epochs_factor}"
        return f"{self.world_size}/{self.strategy.replace(', ', '-')}{longer}/{self.seed}"


def cells(seeds: int) -> list[Cell]:
    """Every cell."""
    found = [
        Cell(world_size, strategy, seed)
        for seed in range(seeds)
        for world_size in (8, 32, 128)
        for strategy in STRATEGIES
    ]
    return [*found, Cell(128, "allreduce", 0, 3), Cell(128, "gossip", 0, 3)]


def make_ranks(cell: Cell) -> VirtualRanks:
    """Replicas that start alike for one seed, whatever the strategy."""
    torch.manual_seed(cell.seed)
    options = dict(STRATEGIES[cell.strategy])
    if "strategy" not in options:
        options["topology"] = by_name(
            "dissemination", cell.world_size, seed=cell.seed, rotate=options.pop("rotate", True)
        )
    return VirtualRanks(
        models.build("mlp", data.info("fashion-mnist")),
        cell.world_size,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=PEAK_LR, momentum=MOMENTUM),
        **options,
    )


def run(cell: Cell, train: Part, test: Part) -> dict[str, Any]:
    """Accuracy of the consensus, loss and distance at the end of each epoch."""
    ranks, (x, y) = make_ranks(cell), train
    steps, epochs = len(y) // GLOBAL_BATCH, EPOCHS * cell.epochs_factor
    found: dict[str, list[float]] = {"accuracy": [], "loss": [], "distance": []}
    for epoch in range(epochs):
        order = np.random.default_rng((cell.seed, epoch)).permutation(len(y))
        rows = torch.from_numpy(order[: steps * GLOBAL_BATCH])
        losses = []
        # Rank r takes positions r, r + p, ... of the step's share: the same samples for every p.
        for chosen in rows.view(steps, -1, cell.world_size).transpose(1, 2):
            rate = cosine(PEAK_LR, ranks.steps, epochs * steps, warm_up_steps=steps)
            ranks.optimizer.param_groups[0]["lr"] = rate
            losses.append(float(ranks.step(x[chosen], y[chosen]).mean()))
        found["accuracy"].append(accuracy(ranks.consensus_model(), test))
        found["loss"].append(statistics.fmean(losses))
        found["distance"].append(ranks.consensus_distance())
        if not math.isfinite(losses[-1]):  # nothing brings it back
            break
    return found


def rows_of(found: list[tuple[Cell, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row a world size and strategy, over its seeds; differences paired by seed, in points.

    A run that diverged has ended there; its accuracy counts on as it was then.
    """
    by_row: dict[tuple[int, str, int], dict[int, list[float]]] = {}
    for cell, figures in found:
        curve = figures["accuracy"]
        curve = curve + [curve[-1]] * (EPOCHS * cell.epochs_factor - len(curve))
        key = (cell.world_size, cell.strategy, cell.epochs_factor)
        by_row.setdefault(key, {})[cell.seed] = curve
    rows = []
    for (world_size, strategy, longer), curves in sorted(by_row.items()):
        beside = by_row.get((world_size, "allreduce", longer), {})
        final = {seed: curve[-1] for seed, curve in curves.items()}
        behind = [100 * (final[s] - beside[s][-1]) for s in final if s in beside]
        rows.append(
            {
                "model": "mlp",
                "world_size": world_size,
                "strategy": strategy,
                "lr_factor": 1.0,
                "epochs_factor": longer,
                "batch_factor": 1,
                "seeds": list(curves),
                "accuracy": list(final.values()),
                "accuracy_mean": round(statistics.fmean(final.values()), 5),
                "minus_allreduce_points": [round(points, 3) for points in behind],
                "accuracy_by_epoch_mean": [
                    round(statistics.fmean(values), 5)
                    for values in zip(*curves.values(), strict=True)
                ],
            }
        )
    return rows


def main() -> None:
    """Runs what is missing, then writes the table; with `--only` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="the start of names such as 128/gossip")
    parser.add_argument("--folder", type=Path, default=Path("runs/virtual_ranks"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = whole("fashion-mnist")
    setting = {"batch": GLOBAL_BATCH, "epochs": EPOCHS, "lr": PEAK_LR, "momentum": MOMENTUM}
    found = []
    for cell in cells(options.seeds):
        if cell.name.startswith(options.only):
            path = options.folder / f"{cell.name}.json"
            figures = once(
                path, {**setting, **asdict(cell)}, lambda cell=cell: run(cell, train, test)
            )
            found.append((cell, figures))
            print(f"{cell.name:40s} accuracy {100 * figures['accuracy'][-1]:.2f} %", flush=True)
    figures = {
        "data": "Fashion-MNIST; each epoch one permutation, dealt out to the ranks",
        "rule": "global batch, epochs, and learning rate (linear warm-up, cosine to 0) are one for "
        "all; accuracy is the consensus's, on the test part",
        "settings": {"mlp": {**setting, "warmup_epochs": 1}},
        "rows": rows_of(found),
    }
    is_whole = not options.only and options.seeds >= SEEDS
    path = None if is_whole else options.folder / "virtual_ranks.json"
    print(write("virtual_ranks", figures, path=path))


if __name__ == "__main__":
    main()
