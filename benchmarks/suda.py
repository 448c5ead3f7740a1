"""Decentralized Muon: where ranks have few classes each, and on a GPT with equal shares of data.

* `heterogeneity`: Fashion-MNIST with a perceptron of two hidden layers of 32, and CIFAR-10 small,
  its images averaged to 16x16, with a ResNet of three blocks (GroupNorm, since BatchNorm's
  statistics would be those of a rank's few classes). The classes of each rank are drawn from a
  Dirichlet distribution (0.05: mostly one or two), on a ring of virtual ranks. `gossip SGD`
  (momentum 0.9) and `gossip AdamW` meet one neighbour a step; `all-reduce Muon` is `demuon` with
  the mean of all ranks as its exchange. What is evaluated is the mean of all replicas.
* `gpt`: two blocks of width 64 on windows of 64 characters of tiny Shakespeare, 8 a rank and step.
  `suda` is `gg.suda` as it comes; with all-reduce one process has the batches of all. Reported is
  the mean loss of the test part, in nats a character.

Polar factors are those of torch.optim.Muon (`polar="muon"`) but for `polar-express`, the default.
Each contestant has its learning rate from three that lie a factor of 3 apart, and further ones
where the best is the first or last, by the first seed. Runs that are done are kept in `runs/suda`.

    python -m benchmarks.suda heterogeneity --ranks 20 --steps 300
    python -m benchmarks.suda heterogeneity --task resnet --ranks 10 --steps 100
    python -m benchmarks.suda gpt --ranks 4 --steps 100
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import gossipgrad as gg
from benchmarks._common import RESULTS, best_rate, once, tell, write
from benchmarks._tasks import GPT, Block, Part, evaluate, loss, mlp, pieces, whole
from gossipgrad.simulate import SudaRanks, VirtualRanks

ALPHA = 0.05
RATES = (1e-3, 3e-3, 1e-2)
CONTEXT, BATCH = 64, 8
Make = Callable[[nn.Module, int, float], Any]


def resnet() -> nn.Module:
    """Three blocks of 8, 16 and 32 channels on 8x8, 4x4 and 2x2, with GroupNorm."""
    blocks = [Block(8, 8), Block(8, 16, 2), Block(16, 32, 2)]
    for block in blocks:
        for name in ("norm1", "norm2"):
            setattr(block, name, nn.GroupNorm(4, getattr(block, name).num_features))
    stem = nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.GroupNorm(4, 8), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained on what; `view` is of a batch of images."""

    data: str
    batch: int
    model: Callable[[], nn.Module] = field(repr=False)
    view: Callable[[Tensor], Tensor] = field(repr=False)


TASKS = {
    "mlp": Task(
        data="fashion-mnist",
        batch=32,
        model=lambda: mlp(784, 10, 32, 32),
        view=lambda x: x.flatten(1),
    ),
    "resnet": Task(data="cifar10-small", batch=16, model=resnet, view=lambda x: F.avg_pool2d(x, 2)),
}


def suda(backbone: str, topology: Any = "ring") -> Make:
    """Muon of the paper: an average of gradients, no look ahead."""

    def make(model: nn.Module, ranks: int, lr: float) -> SudaRanks:
        return SudaRanks(
            model,
            ranks,
            backbone=backbone,
            topology=np.full((ranks, ranks), 1 / ranks) if topology == "all" else topology,
            lr=lr,
            momentum=0.9,
            nesterov=False,
            momentum_form="ema",
            polar="muon",
        )

    return make


def gossip(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    """One neighbour a step."""

    def make(model: nn.Module, ranks: int, lr: float) -> VirtualRanks:
        return VirtualRanks(
            model,
            ranks,
            optimizer=lambda parameters: optimizer(parameters, lr=lr, **options),
            topology="ring",
        )

    return make


MUON, SGD, ADAMW = (0.006, 0.02, 0.06), (0.01, 0.03, 0.1), (1e-3, 3e-3, 1e-2)
WAYS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "ed": (suda("ed"), MUON),
    "atc-gt": (suda("atc-gt"), MUON),
    "semi-atc-gt": (suda("semi-atc-gt"), MUON),
    "demuon": (suda("demuon"), MUON),
    "all-reduce Muon": (suda("demuon", "all"), MUON),
    "gossip SGD": (gossip(torch.optim.SGD, momentum=0.9), SGD),
    "gossip AdamW": (gossip(torch.optim.AdamW), ADAMW),
}


def shares(labels: Tensor, ranks: int, batch: int, seed: int) -> list[Tensor]:
    """The samples of each rank: of every class a Dirichlet share."""
    random = np.random.default_rng(seed)
    held: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for label in range(10):
        rows = random.permutation(np.flatnonzero(labels.numpy() == label))
        cuts = np.cumsum(random.dirichlet([ALPHA] * ranks))[:-1] * len(rows)
        for rank, part in enumerate(np.split(rows, cuts.astype(int))):
            held[rank].append(part)
    found = [torch.from_numpy(np.concatenate(each)) for each in held]
    return [
        each if len(each) >= batch else torch.arange(batch) + rank
        for rank, each in enumerate(found)
    ]


def train(
    task: Task, make: Make, lr: float, parts: tuple[Part, Part], ranks: int, steps: int, seed: int
) -> dict[str, float]:
    """Accuracy of the consensus in percent, its loss, and the distance of ranks to it."""
    (x, y), test = parts
    torch.manual_seed(seed)
    virtual = make(task.model(), ranks, lr)
    held = shares(y, ranks, task.batch, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.stack(
            [each[torch.randint(len(each), (task.batch,), generator=generator)] for each in held]
        )
        virtual.step(x[chosen], y[chosen])
    found = evaluate(virtual.consensus_model(), test)
    return found | {"distance": virtual.consensus_distance()}


ALL_REDUCE: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "all-reduce Muon": lambda model, lr: gg.Muon(model, lr, scale="match_rms_adamw", polar="muon"),
    "all-reduce Muon, polar-express": lambda model, lr: gg.Muon(
        model, lr, scale="match_rms_adamw", polar="polar-express"
    ),
    "all-reduce AdamW": lambda model, lr: torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
    ),
}


def stepper(name: str, model: nn.Module, ranks: int, lr: float) -> tuple[Any, Callable, Callable]:
    """An optimizer, a step on the windows of all ranks, and the model that is evaluated."""
    if name in ALL_REDUCE:
        optimizer = ALL_REDUCE[name](model, lr)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

        return optimizer, step, lambda: model
    options = {"scale": "match_rms_adamw", "polar": "muon", "loss": loss}
    virtual = SudaRanks(model, ranks, lr=lr, **options)

    def steps(x: Tensor, y: Tensor) -> None:
        virtual.step(x.view(ranks, BATCH, -1), y.view(ranks, BATCH, -1))

    return virtual.optimizer, steps, virtual.consensus_model


def train_gpt(name: str, lr: float, ranks: int, steps: int, seed: int) -> dict[str, float]:
    """One run; the first half of each piece of 128 characters."""
    (x, y), (test_x, test_y) = (pieces(part) for part in (0, 1))
    torch.manual_seed(seed)
    model = GPT(context=CONTEXT, layers=2, width=64)
    optimizer, step, evaluated = stepper(name, model, ranks, lr)
    scheduler = LambdaLR(optimizer, lambda k: min((k + 1) / (0.1 * steps), (1 - k / steps) / 0.9))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (ranks * BATCH,), generator=generator)
        step(x[chosen, :CONTEXT], y[chosen, :CONTEXT])
        scheduler.step()
    return evaluate(evaluated(), (test_x[:, :CONTEXT], test_y[:, :CONTEXT]))


def main() -> None:
    """Fills the cells of one size, in `results/suda_heterogeneity.json` or `suda_gpt.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("question", choices=("heterogeneity", "gpt"))
    parser.add_argument("--task", choices=TASKS, default="mlp")
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="contestants; all by default")
    parser.add_argument("--folder", type=Path, default=Path("runs/suda"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, steps, task = options.ranks, options.steps, TASKS[options.task]
    is_gpt = options.question == "gpt"
    rates = dict.fromkeys(("suda", *ALL_REDUCE), RATES) if is_gpt else {w: WAYS[w][1] for w in WAYS}
    size, metric = f"{ranks} ranks, {steps} steps", "loss" if is_gpt else "accuracy"
    parts: Any = None
    if not is_gpt:
        size = f"{options.task}, {size}"
        parts = tuple((task.view(x), y) for x, y in whole(task.data))
    setting = {"question": options.question, "size": size, "task": asdict(task)["data"]}
    path = RESULTS / f"suda_{options.question}.json"
    cells = json.loads(path.read_text())["cells"] if path.exists() else {}
    sign = 1 if is_gpt else -1
    for way in options.only or rates:

        def run(lr: float, seed: int = 0, way: str = way) -> dict[str, float]:
            name = f"{size}-{way}-{lr:g}-{seed}".replace(", ", "-").replace(" ", "-")
            if is_gpt:
                act = lambda: train_gpt(way, lr, ranks, steps, seed)  # noqa: E731
            else:
                act = lambda: train(task, WAYS[way][0], lr, parts, ranks, steps, seed)  # noqa: E731
            return once(options.folder / f"{name}.json", setting, act)

        lr, tried = best_rate(rates[way], lambda lr, run=run: sign * run(lr)[metric], 3.0)
        found = [run(lr, seed)[metric] for seed in range(options.seeds)]
        row: dict[str, Any] = {"lr": lr, "mean": round(statistics.mean(found), 4)}
        row["standard_deviation"] = round(statistics.stdev(found), 4) if len(found) > 1 else None
        row |= {metric: found, "tried": {f"{rate:g}": sign * v for rate, v in tried.items()}}
        cells.setdefault(size, {})[way] = row
        tell(f"{size}, {way}", row)
        write(path.stem, {"alpha": ALPHA, "cells": cells}, module="suda")


if __name__ == "__main__":
    main()
