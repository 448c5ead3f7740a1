"""Does gossip keep all-reduce's accuracy at 128 workers? Measured with virtual ranks.

Trains on Fashion-MNIST in one process with `gossipgrad.simulate.VirtualRanks`. All cells of one
model see the same samples in the same steps: the global batch, the epochs and the learning rate are
one for all strategies and world sizes, and each rank takes its share of the batch.

A cell that is done is kept; one that was interrupted goes on from its last epoch; what was trained
with other settings is refused. Two processes on one folder share the cells. Figures of all cells
that are done go into the results and into the tables of docs/simulate.md; what is published, and of
which fewer seeds are here, stays as it is:

    python -m benchmarks.virtual_ranks
    python -m benchmarks.virtual_ranks --only mlp/128/gossip --seeds 1
    python -m benchmarks.virtual_ranks --report  # publishes what is done
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import _common, published
from benchmarks._alone import BusyError, alone
from benchmarks._virtual_ranks_page import fill_page
from benchmarks._virtual_ranks_table import DISTANCES_PER_EPOCH, merged, table
from gossipgrad import WeightsAndState, data, models
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import by_name
from gossipgrad.train._summary import write_json

STRATEGIES: dict[str, dict] = {
    "allreduce": {"strategy": "allreduce"},
    "gossip": {},
    "gossip, hypercube": {"topology": "hypercube"},
    "gossip, no rotation": {"rotate": False},
    "gossip, hypercube, no rotation": {"topology": "hypercube", "rotate": False},
    "gossip, state": {"payload": "weights+state"},
    "gossip, state every 4": {"payload": "weights+state", "state_every": 4},
    "gossip, bf16": {"wire_dtype": torch.bfloat16},
    "gossip, state, bf16": {"payload": "weights+state", "wire_dtype": torch.bfloat16},
    "gossip, sync": {"mode": "sync"},
    "gossip, average every 8": {"average_every": 8},
    "gossip, average every 32": {"average_every": 32},
    "local, average every 8": {"strategy": "local", "average_every": 8},
    # Every step it is all-reduce; every-log-p is the next of the row.
    **{
        f"local, state, average every {every}": {
            "strategy": "local",
            "payload": "weights+state",
            "average_every": every,
        }
        for every in (1, 2, 4)
    },
    "every-log-p": {"strategy": "every-log-p"},
    "local": {"strategy": "local"},
}


class OtherSettingsError(ValueError):
    """What was trained with other settings cannot stand beside what these bring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all cells of one model share."""

    global_batch: int
    epochs: int
    peak_lr: float
    momentum: float
    warmup_epochs: int


SETTINGS = {
    "mlp": Setting(global_batch=2048, epochs=20, peak_lr=0.1, momentum=0.9, warmup_epochs=1),
    "lenet": Setting(global_batch=2048, epochs=15, peak_lr=0.1, momentum=0.9, warmup_epochs=1),
}
SEEDS = 3
REPLICAS_EVALUATED = 8


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One run."""

    model: str
    world_size: int
    strategy: str
    seed: int
    lr_factor: float = 1.0
    epochs_factor: int = 1
    batch_factor: int = 1

    @property
    def setting(self) -> Setting:
        return self.of(SETTINGS[self.model])

    def of(self, setting: Setting) -> Setting:
        """Its own, where the model's is `setting`."""
        return replace(
            setting,
            peak_lr=setting.peak_lr * self.lr_factor,
            epochs=setting.epochs * self.epochs_factor,
            global_batch=setting.global_batch * self.batch_factor,
        )

    @property
    def name(self) -> str:
        contestant = self.strategy.replace(", ", "-").replace(" ", "-")
        if self.lr_factor != 1:
            contestant += f"-lr-x{self.lr_factor:g}"
        if self.epochs_factor != 1:
            contestant += f"-epochs-x{self.epochs_factor}"
        if self.batch_factor != 1:
            contestant += f"-batch-x{self.batch_factor}"
        return f"{self.model}/{self.world_size}/{contestant}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Part:
    """Inputs and labels, in memory as the model takes them."""

    x: Tensor
    y: Tensor


def cells(seeds: int) -> list[Cell]:
    """Every cell, the most telling first."""
    main = ["allreduce", "gossip", "gossip, hypercube", "gossip, no rotation", "every-log-p"]
    main += ["gossip, hypercube, no rotation", "local"]
    payloads = ["gossip, state", "gossip, state every 4", "gossip, bf16"]
    four = ["allreduce", "gossip", "every-log-p", "local"]
    helpers = ["gossip, average every 8", "gossip, average every 32", "local, average every 8"]
    helpers += ["gossip, sync"]
    averages = [f"local, state, average every {every}" for every in (2, 4, 1)]

    def of(model: str, sizes: list[int], strategies: list[str], seed: int) -> list[Cell]:
        return [Cell(model, p, strategy, seed) for p in sizes for strategy in strategies]

    order = [Cell("mlp", 1, "allreduce", 0)]
    order += of("mlp", [128, 8], main, 0) + of("mlp", [128], payloads + helpers + averages, 0)
    for factors in ((0.5, 1), (2.0, 1), (1.0, 3)):
        order += [Cell("mlp", 128, strategy, 0, *factors) for strategy in four[:2]]
    order += of("mlp", [32], main, 0) + of("lenet", [128], four[:3], 0)
    order += of("mlp", [1], ["allreduce"], 1) + of("mlp", [128, 8], main, 1)
    order += [Cell("mlp", 128, strategy, 0, 1.0, 4, 4) for strategy in four[:2]]
    order += of("lenet", [128, 8], four, 0) + of("mlp", [128], payloads, 1)
    for seed in range(seeds):
        order += of("mlp", [1], ["allreduce"], seed)
        order += of("mlp", [128, 8, 32], main + payloads, seed)
        order += of("lenet", [1], ["allreduce"], seed) + of("lenet", [128, 8, 32], four, seed)
    return [cell for cell in dict.fromkeys(order) if cell.seed < seeds]


def load(device: str) -> tuple[Part, Part]:
    """The training and the test part."""
    dataset = data.load("fashion-mnist")
    parts = []
    for samples in (dataset.train, dataset.test):
        x, y = samples.batch(torch.arange(len(samples)))
        parts.append(Part(x.to(device), y.to(device)))
    return parts[0], parts[1]


def make_ranks(cell: Cell, device: str) -> VirtualRanks:
    """Replicas that start alike for one seed, whatever the strategy."""
    torch.manual_seed(cell.seed)
    model = models.build(cell.model, data.info("fashion-mnist")).to(device)
    setting = cell.setting
    options = dict(STRATEGIES[cell.strategy])
    rotate, state_every = options.pop("rotate", True), options.pop("state_every", 1)
    if options.get("payload") == "weights+state":
        options["payload"] = WeightsAndState(every=state_every)
    if "strategy" not in options:
        name = options.pop("topology", "dissemination")
        options["topology"] = by_name(name, cell.world_size, seed=cell.seed, rotate=rotate)
    return VirtualRanks(
        model,
        cell.world_size,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=setting.peak_lr, momentum=setting.momentum
        ),
        **options,
    )


def learning_rate(setting: Setting, step: int, steps_per_epoch: int) -> float:
    """Linear to the peak, then a cosine to 0."""
    warmup = setting.warmup_epochs * steps_per_epoch
    if step < warmup:
        return setting.peak_lr * (step + 1) / warmup
    done = (step - warmup) / (setting.epochs * steps_per_epoch - warmup)
    return setting.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def accuracy(model: nn.Module, test: Part) -> float:
    model.eval()
    pairs = zip(test.x.split(1000), test.y.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(test.y)


def train_epoch(ranks: VirtualRanks, cell: Cell, train: Part, epoch: int) -> dict:
    """One epoch; the loss over all ranks, and how far they were apart on the way."""
    setting, p = cell.setting, cell.world_size
    steps = len(train.y) // setting.global_batch
    order = np.random.default_rng((cell.seed, epoch)).permutation(len(train.y))
    rows = torch.from_numpy(order[: steps * setting.global_batch]).to(train.y.device)
    at = {round(steps * (i + 1) / DISTANCES_PER_EPOCH) for i in range(DISTANCES_PER_EPOCH)}
    losses, distances = [], []
    # Rank r takes positions r, r + p, ... of the step's share: the same samples for every p.
    for i, chosen in enumerate(rows.view(steps, -1, p).transpose(1, 2), start=1):
        rate = learning_rate(setting, ranks.steps, steps)
        for group in ranks.optimizer.param_groups:
            group["lr"] = rate
        losses.append(ranks.step(train.x[chosen], train.y[chosen]).mean())
        if i in at:
            distances.append([ranks.steps, ranks.consensus_distance()])
    return {"loss": torch.stack(losses).mean().item(), "distances": distances}


def kept(cell: Cell, folder: Path) -> dict | None:
    """The figures of a cell that is done, None if it is not.

    Raises:
        OtherSettingsError: It was trained with others.
    """
    done = folder / f"{cell.name}.json"
    if not done.exists():
        return None
    figures = json.loads(done.read_text())
    _check(figures, cell, done)
    return figures


def _check(saved: dict, cell: Cell, path: Path) -> None:
    """Cells that do not say what they were trained with are taken to be as those published."""
    wanted = asdict(cell.setting)
    results = _common.RESULTS / "virtual_ranks.json"
    found = saved.get("setting")
    if found is None and results.exists():
        held = json.loads(results.read_text())["settings"].get(cell.model)
        found = held and asdict(cell.of(Setting(**held)))
    if found != wanted:
        raise OtherSettingsError(
            f"{path} was trained with {found or 'settings that it does not name'}, and now they "
            f"are {wanted}: give another --folder, or move the file away"
        )


def run(cell: Cell, folder: Path, train: Part, test: Part) -> dict:
    """The figures of one cell; from disk if it was done, from its last epoch if it was begun.

    Raises:
        BusyError: Another process is at it.
        OtherSettingsError: It was done or begun with others.
    """
    if (figures := kept(cell, folder)) is not None:
        return figures
    with alone(folder / f"{cell.name}.lock"):
        return kept(cell, folder) or _trained(cell, folder, train, test)


def _trained(cell: Cell, folder: Path, train: Part, test: Part) -> dict:
    done, begun = folder / f"{cell.name}.json", folder / f"{cell.name}.pt"
    device = str(train.y.device)
    ranks = make_ranks(cell, device)
    setting = cell.setting
    figures: dict = {"accuracy": [], "loss": [], "distances": [], "seconds": 0.0}
    if begun.exists():
        saved = torch.load(begun, map_location=device, weights_only=True)
        _check(saved, cell, begun)
        ranks.load_state_dict(saved["ranks"])
        figures = saved["figures"]
    for epoch in range(len(figures["loss"]), setting.epochs):
        start = time.perf_counter()
        found = train_epoch(ranks, cell, train, epoch)
        figures["accuracy"].append(accuracy(ranks.consensus_model(), test))
        figures["loss"].append(found["loss"])
        figures["distances"] += found["distances"]
        figures["seconds"] += time.perf_counter() - start
        if not math.isfinite(found["loss"]):  # nothing brings it back
            break
        partial = begun.with_suffix(".partial")
        held = {"setting": asdict(setting), "ranks": ranks.state_dict(), "figures": figures}
        torch.save(held, partial)
        partial.replace(begun)
    some = np.unique(np.linspace(0, cell.world_size - 1, REPLICAS_EVALUATED).astype(int))
    figures["replica_accuracy"] = [accuracy(ranks.replica(int(r)), test) for r in some]
    result = {**asdict(cell), "setting": asdict(setting), **figures}
    write_json(done, result)
    begun.unlink(missing_ok=True)
    return result


def report(chosen: list[Cell], folder: Path) -> Path:
    """Writes what is done so far, into the results and into the tables of the pages.

    Rows that are published over more seeds than are here stay, and are told.

    Raises:
        OtherSettingsError: What is published, or what is here, was trained with others.
    """
    done = [kept(cell, folder) for cell in chosen]
    path = _common.RESULTS / "virtual_ranks.json"
    settings = {name: asdict(setting) for name, setting in SETTINGS.items()}
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "settings": settings}
    if before["settings"] != settings:
        raise OtherSettingsError(
            f"{path} was trained with other settings, {before['settings']}: its rows cannot stand "
            "beside these; remove it to publish what is here alone"
        )
    found = table([figures for figures in done if figures is not None])
    rows, stay = merged(found, before["rows"])
    if stay:
        print(f"{len(stay)} of {len(rows)} rows stay as published: over fewer seeds here, or none")
    if rows != before["rows"]:
        _common.write(
            path.stem,
            {
                "data": "Fashion-MNIST; each epoch one permutation, dealt out to the ranks",
                "rule": "global batch, epochs, and learning rate (linear warm-up, cosine to 0) are "
                "one for all strategies and world sizes; accuracy is the consensus's, on the test "
                "part",
                "seconds": "of a machine shared with other work, pauses included: no timings",
                "settings": settings,
                "cells_done": sum(len(row["seeds"]) for row in rows),
                "cells": len(chosen),
                "rows": rows,
            },
        )
    fill_page(rows)
    published.fill_page()
    return path


def main() -> int:
    """Runs what is missing, then writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", help="starts of names such as mlp/128/gossip")
    parser.add_argument("--quick", action="store_true", help="seed 0 at 8 ranks, MLP")
    parser.add_argument("--report", action="store_true", help="publish what is done, run nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/virtual_ranks"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    starts = tuple(options.only or ("",))
    chosen = [cell for cell in cells(options.seeds) if cell.name.startswith(starts)]
    if options.quick:
        chosen = [c for c in chosen if (c.model, c.world_size, c.seed) == ("mlp", 8, 0)]
    try:
        if not options.report:
            _run_all(chosen, options)
        print(report(cells(max(options.seeds, SEEDS)), options.folder))
    except OtherSettingsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run_all(chosen: list[Cell], options: argparse.Namespace) -> None:
    for cell in chosen:  # rather now than hours later
        kept(cell, options.folder)
    train, test = load(options.device)
    for cell in chosen:
        try:
            result = run(cell, options.folder, train, test)
        except BusyError as error:
            print(f"{cell.name:48s} left out: {error}", flush=True)
            continue
        print(
            f"{cell.name:48s} accuracy {100 * result['accuracy'][-1]:.2f} % "
            f"distance {result['distances'][-1][1]:.4f} {result['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
