"""Does a sparsified gradient train to the accuracy of the dense one, and what helps if not?

Fashion-MNIST LeNet, CIFAR-10 ResNet-20 and a character GPT, at 4 and 8 ranks in one process (see
`_sparsified_ranks`), seeds paired. All cells of one model see the same samples in the same steps:
global batch, epochs and learning rate are one for all. A cell that is done is kept, one that was
interrupted goes on from its last epoch; figures of all cells that are done go into the results:

    python -m benchmarks.sparse_convergence
    python -m benchmarks.sparse_convergence --only lenet/4 --seeds 1
    python -m benchmarks.sparse_convergence --report  # publishes what is done
"""

import argparse
import inspect
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import gossipgrad as gg
from benchmarks._alone import BusyError, alone
from benchmarks._common import RESULTS, write
from benchmarks._pages import DOCS, fill, table
from benchmarks._sparsified_ranks import SparsifiedRanks
from benchmarks.accuracy import interval
from gossipgrad import data, models
from gossipgrad.models import training_loss
from gossipgrad.train._summary import write_json

WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
WARMUP_EPOCHS = {"lenet": 4, "resnet20": 4, "gpt": 1.5}  # half of a run at most
SEEDS = 3
DEFAULT_DENSITY = inspect.signature(gg.sparsify).parameters["density"].default


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all cells of one model share."""

    data: str
    optimizer: str
    global_batch: int
    epochs: int
    peak_lr: float
    clip: float | None = None


SETTINGS = {
    "lenet": Setting(
        data="fashion-mnist", optimizer="sgd", global_batch=256, epochs=8, peak_lr=0.05
    ),
    "resnet20": Setting(
        data="cifar10-small", optimizer="sgd", global_batch=128, epochs=10, peak_lr=0.2
    ),
    "gpt": Setting(
        data="shakespeare", optimizer="adamw", global_batch=64, epochs=3, peak_lr=1e-3, clip=1.0
    ),
}


@dataclass(frozen=True, slots=True)
class Method:
    """What is done to the gradient."""

    density: float | None = None  # or that of `default`; None: dense
    per_tensor: bool = False
    warmup: bool = False
    correction: bool = False
    default: bool = False

    @property
    def name(self) -> str:
        if self.default:
            return "the default of gg.sparsify"
        if self.density is None:
            return "dense"
        parts = [f"density {self.density:g}"]
        parts += ["per tensor"] * self.per_tensor + ["warm-up"] * self.warmup
        parts += ["momentum correction"] * self.correction
        return ", ".join(parts)

    def at(self, step: int, warmup_steps: int) -> float:
        """The density in a step: falling over the first steps, with warm-up."""
        if self.default:
            return DEFAULT_DENSITY(step)
        assert self.density is not None, "the dense method has none"
        stage = len(WARMUP_DENSITIES) * step // warmup_steps
        if self.warmup and stage < len(WARMUP_DENSITIES):
            return max(self.density, WARMUP_DENSITIES[stage])
        return self.density


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    model: str
    world_size: int
    method: Method
    seed: int

    @property
    def name(self) -> str:
        slug = self.method.name.replace(", ", "-").replace(" ", "-")
        return f"{self.model}/{self.world_size}/{slug}/{self.seed}"


def cells(seeds: int) -> list[Cell]:
    """Every cell, the most telling first."""
    main = [Method(), Method(0.01), Method(0.001)]
    helps = [Method(0.001, warmup=True), Method(0.001, per_tensor=True)]
    helps += [Method(0.01, per_tensor=True), Method(0.01, warmup=True)]
    corrected = [Method(rho, warmup=True, correction=True) for rho in (0.001, 0.01)]
    order = []
    default = [Method(0.01, default=True)]
    for methods in (main, default, helps[:2], corrected, helps[2:]):
        for seed in range(seeds):
            for model in SETTINGS:
                if methods is corrected and SETTINGS[model].optimizer != "sgd":
                    continue
                order += [Cell(model, p, method, seed) for p in (4, 8) for method in methods]
    return order


def learning_rate(setting: Setting, step: int, steps_per_epoch: int) -> float:
    """Linear to the peak in the first epoch, then a cosine to 0."""
    if step < steps_per_epoch:
        return setting.peak_lr * (step + 1) / steps_per_epoch
    done = (step - steps_per_epoch) / ((setting.epochs - 1) * steps_per_epoch)
    return setting.peak_lr * 0.5 * (1 + math.cos(math.pi * done))


def make(cell: Cell, info: data.DatasetInfo, steps_per_epoch: int) -> tuple[nn.Module, tuple]:
    """The model, and with it its optimizer and the ranks; alike for one seed."""
    setting, method = SETTINGS[cell.model], cell.method
    warmup_steps = round(WARMUP_EPOCHS[cell.model] * steps_per_epoch)
    torch.manual_seed(cell.seed)
    model = models.build(cell.model, info)
    if setting.optimizer == "sgd":
        momentum = 0.0 if method.correction else 0.9
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=setting.peak_lr, momentum=momentum
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.peak_lr, weight_decay=0.1)
    ranks = SparsifiedRanks(
        model,
        optimizer,
        cell.world_size,
        loss=training_loss,
        density=(None if method.density is None else partial(method.at, warmup_steps=warmup_steps)),
        per_tensor=method.per_tensor,
        momentum=0.9 if method.correction else None,
        clip=setting.clip,
    )
    return model, (optimizer, ranks)


@torch.no_grad()
def evaluate(model: nn.Module, test: data.Samples) -> tuple[float, float]:
    """Accuracy over all labels of the test part, and loss a label."""
    model.eval()
    right = labels = 0
    total = 0.0
    for indices in torch.arange(len(test)).split(100):
        x, y = test.batch(indices)
        logits = model(x)
        right += int((logits.argmax(-1) == y).sum())
        flat = logits.reshape(-1, logits.shape[-1])
        total += float(nn.functional.cross_entropy(flat, y.reshape(-1), reduction="sum"))
        labels += y.numel()
    model.train()
    return right / labels, total / labels


def batches_of(
    samples: data.Samples, chosen: Tensor, world_size: int, augment: tuple[int, int]
) -> list[tuple[Tensor, Tensor]]:
    """The step's samples, dealt out: rank r has positions r, r + p, ..."""
    return [samples.batch(rows, augment=augment) for rows in chosen.view(-1, world_size).T]


def run(cell: Cell, dataset: data.Dataset, folder: Path) -> dict:
    """The figures of one cell; from disk if it was done, from its last epoch if it was begun.

    Raises:
        BusyError: Another process is at it.
        ValueError: It was done or begun with other settings.
    """
    done = folder / f"{cell.name}.json"
    if (figures := kept(cell, folder)) is not None:
        return figures
    with alone(folder / f"{cell.name}.lock"):
        return kept(cell, folder) or _trained(cell, dataset, done)


def kept(cell: Cell, folder: Path) -> dict | None:
    """The figures of a cell that is done, None if it is not."""
    done = folder / f"{cell.name}.json"
    if not done.exists():
        return None
    figures = json.loads(done.read_text())
    _check(figures["setting"], cell, done)
    return figures


def _check(found: dict, cell: Cell, path: Path) -> None:
    if found != (wanted := asdict(SETTINGS[cell.model])):
        raise ValueError(
            f"{path} was trained with {found}, and now settings are {wanted}: give another "
            "--folder, or move the file away"
        )


def _trained(cell: Cell, dataset: data.Dataset, done: Path) -> dict:
    setting, begun = SETTINGS[cell.model], done.with_suffix(".pt")
    steps = len(dataset.train) // setting.global_batch
    model, (optimizer, ranks) = make(cell, dataset.info, steps)
    figures: dict = {"setting": asdict(setting), "accuracy": [], "test_loss": [], "loss": []}
    figures["seconds"] = 0.0
    if begun.exists():
        saved = torch.load(begun, weights_only=True)
        _check(saved["figures"]["setting"], cell, begun)
        ranks.load_state_dict(saved["ranks"])
        figures = saved["figures"]
    for epoch in range(len(figures["loss"]), setting.epochs):
        start = time.perf_counter()
        # Whatever is drawn besides, by dropout for example, is drawn alike after an interruption.
        torch.manual_seed(1000 * cell.seed + epoch)
        order = np.random.default_rng((cell.seed, epoch)).permutation(len(dataset.train))
        losses = []
        for chosen in torch.from_numpy(order).split(setting.global_batch)[:steps]:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(setting, ranks.steps, steps)
            losses.append(
                ranks.step(batches_of(dataset.train, chosen, cell.world_size, (cell.seed, epoch)))
            )
        accuracy, test_loss = evaluate(model, dataset.test)
        figures["accuracy"].append(accuracy)
        figures["test_loss"].append(test_loss)
        figures["loss"].append(statistics.fmean(losses))
        figures["seconds"] += time.perf_counter() - start
        if not math.isfinite(figures["loss"][-1]):  # nothing brings it back
            break
        begun.parent.mkdir(parents=True, exist_ok=True)
        partial_file = begun.with_suffix(".partial")
        torch.save({"ranks": ranks.state_dict(), "figures": figures}, partial_file)
        partial_file.replace(begun)
    write_json(done, figures)
    begun.unlink(missing_ok=True)
    return figures


def rows_of(found: Iterable[tuple[Cell, dict]]) -> list[dict]:
    """One row a model, world size and method; differences to dense paired by seed, in points."""
    by_row: dict[tuple[str, int, Method], dict[int, dict]] = defaultdict(dict)
    for cell, figures in found:
        by_row[cell.model, cell.world_size, cell.method][cell.seed] = figures
    rows = []
    methods = list(dict.fromkeys(cell.method for cell in cells(1)))
    order = sorted(
        by_row, key=lambda key: (list(SETTINGS).index(key[0]), key[1], methods.index(key[2]))
    )
    for model, world_size, method in order:
        of_seeds = by_row[model, world_size, method]
        seeds = sorted(of_seeds)
        dense = by_row[model, world_size, Method()] if method.density is not None else {}
        both = [seed for seed in seeds if seed in dense]
        differences = [
            100 * (of_seeds[seed]["accuracy"][-1] - dense[seed]["accuracy"][-1]) for seed in both
        ]
        row = {
            "model": model,
            "world_size": world_size,
            "method": method.name,
            "seeds": seeds,
            "accuracy": [of_seeds[seed]["accuracy"][-1] for seed in seeds],
            "test_loss": [of_seeds[seed]["test_loss"][-1] for seed in seeds],
            "difference_to_dense_points": differences,
        }
        if len(differences) > 1:
            mean, half = interval(differences)
            row["mean_difference_points"] = round(mean, 3)
            row["half_width_95_points"] = round(half, 3)
        rows.append(row)
    return rows


def with_published(rows: list[dict], published: list[dict]) -> list[dict]:
    """Rows, and in place of those that are missing or have fewer seeds what was published."""
    held = {_key(row): row for row in published}
    held |= {
        _key(row): row
        for row in rows
        if len(row["seeds"]) >= len(held.get(_key(row), {"seeds": []})["seeds"])
    }
    methods = list(dict.fromkeys(cell.method.name for cell in cells(1)))
    return sorted(
        held.values(),
        key=lambda row: (
            list(SETTINGS).index(row["model"]),
            row["world_size"],
            methods.index(row["method"]),
        ),
    )


def _key(row: dict) -> tuple[str, int, str]:
    return row["model"], row["world_size"], row["method"]


def page_table(figures: dict) -> str:
    """Accuracy by method, and its distance from dense on the same seeds."""
    head = ["trained", "ranks", "gradient", "seeds", "accuracy, %", "against dense, points"]
    rows = []
    for row in figures["rows"]:
        differences = row["difference_to_dense_points"]
        against = f"{statistics.fmean(differences):+.2f}" if differences else ""
        if "half_width_95_points" in row:
            against += f" (within {row['half_width_95_points']:.2f})"
        accuracy = 100 * statistics.fmean(row["accuracy"])
        rows.append(
            [
                row["model"],
                str(row["world_size"]),
                row["method"],
                str(len(row["seeds"])),
                f"{accuracy:.2f}",
                against,
            ]
        )
    return table(head, rows)


def report(seeds: int, folder: Path) -> Path:
    """Writes what is done so far; what was published with more seeds stays."""
    chosen = cells(seeds)
    path = RESULTS / "sparse_convergence.json"
    published = json.loads(path.read_text())["rows"] if path.exists() else []
    found = [(cell, figures) for cell in chosen if (figures := kept(cell, folder)) is not None]
    rows = with_published(rows_of(found), published)
    figures = {
        "rule": "accuracy on the test part after the last epoch; of the text, of the next "
        "character; differences to the dense run of the same seed, in points",
        "selection": "from the whole model as one group, or by tensor",
        "warm_up": f"densities {WARMUP_DENSITIES}, equally long, over {WARMUP_EPOCHS} epochs",
        "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
        "cells_done": sum(len(row["seeds"]) for row in rows),
        "cells": len(cells(SEEDS)),
        "rows": rows,
    }
    page = DOCS / "sparsify.md"
    page.write_text(fill(page.read_text(), page_table(figures)))
    return write("sparse_convergence", figures)


def main() -> None:
    """Runs what is missing, then writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", help="starts of names such as lenet/4/dense")
    parser.add_argument("--report", action="store_true", help="publish what is done, run nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/sparse_convergence"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = [c for c in cells(options.seeds) if c.name.startswith(tuple(options.only or ("",)))]
    datasets: dict[str, data.Dataset] = {}
    for cell in [] if options.report else chosen:
        name = SETTINGS[cell.model].data
        if name not in datasets:
            datasets[name] = data.load(name)
        try:
            figures = run(cell, datasets[name], options.folder)
        except BusyError as error:
            print(f"{cell.name:48s} left out: {error}", flush=True)
            continue
        print(
            f"{cell.name:48s} accuracy {100 * figures['accuracy'][-1]:.2f} %  "
            f"test loss {figures['test_loss'][-1]:.3f}  {figures['seconds']:.0f} s",
            flush=True,
        )
        report(options.seeds, options.folder)
    print(report(options.seeds, options.folder))


if __name__ == "__main__":
    main()
