"""Decentralized Muon: where ranks have few classes each, and on a GPT with data dealt alike.

* `heterogeneity`: Fashion-MNIST with a perceptron of two hidden layers of 32, and CIFAR-10 small,
  its images averaged to 16x16, with a ResNet of three blocks (GroupNorm, since BatchNorm's
  statistics would be those of a rank's few classes). The classes of each rank are drawn from a
  Dirichlet distribution (0.05: mostly one or two), on a ring of virtual ranks. `gossip SGD`
  (momentum 0.9) and `gossip AdamW` meet one neighbour a step; `all-reduce Muon` is `demuon` with
  the mean of all ranks as its exchange. What is evaluated is the mean of all replicas.
* `gpt`: two blocks of width 64 on windows of 64 characters of tiny Shakespeare, 8 a rank and step.
  `suda` is `gg.suda` as it comes; with all-reduce one process has the batches of all. Reported is
  the mean loss of the test part, in nats a character.

Each contestant has its learning rate from three that lie a factor of 3 apart, and further ones
where the best is the first or last, by the first seed; the other seeds run with that one alone.
Runs that are done are kept in `results/raw`.

    python -m benchmarks.suda heterogeneity --ranks 20 --steps 300
    python -m benchmarks.suda heterogeneity --task resnet --ranks 10 --steps 100
    python -m benchmarks.suda gpt --ranks 4 --steps 100
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import gossipgrad as gg
from benchmarks._common import RESULTS, write
from benchmarks._tasks import accuracy, whole
from gossipgrad import data
from gossipgrad.models import GPT, MLP, training_loss
from gossipgrad.simulate import SudaRanks, VirtualRanks

ALPHA = 0.05
SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2)
CONTEXT, BATCH = 64, 8
Make = Callable[[nn.Module, int, float], Any]


class Block(nn.Module):
    """Two convolutions beside a shortcut without weights."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Half as high and wide where the stride is 2."""
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(inner + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)))


def resnet() -> nn.Module:
    """Three blocks of 8, 16 and 32 channels on 8x8, 4x4 and 2x2."""
    stem = nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.GroupNorm(4, 8), nn.ReLU()
    blocks = Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained on what; `view` is of a batch of images."""

    data: str
    batch: int
    model: Callable[[], nn.Module]
    view: Callable[[Tensor], Tensor]


TASKS = {
    "mlp": Task(
        data="fashion-mnist",
        batch=32,
        model=lambda: MLP(784, 10, hidden_size=32),
        view=lambda x: x.flatten(1),
    ),
    "resnet": Task(data="cifar10-small", batch=16, model=resnet, view=lambda x: F.avg_pool2d(x, 2)),
}


def suda(backbone: str, topology: Any = "ring") -> Make:
    """Muon of the paper: an average of gradients, no look ahead."""

    def make(model: nn.Module, ranks: int, lr: float) -> SudaRanks:
        graph = np.full((ranks, ranks), 1 / ranks) if topology == "all" else topology
        return SudaRanks(
            model,
            ranks,
            backbone=backbone,
            topology=graph,
            batching="vmap",
            lr=lr,
            momentum=0.9,
            nesterov=False,
            momentum_form="ema",
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
            batching="vmap",
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
        places = random.permutation(np.flatnonzero(labels.numpy() == label))
        cuts = np.cumsum(random.dirichlet([ALPHA] * ranks))[:-1] * len(places)
        for rank, part in enumerate(np.split(places, cuts.astype(int))):
            held[rank].append(part)
    found = [torch.from_numpy(np.concatenate(each)) for each in held]
    return [
        each if len(each) >= batch else torch.arange(batch) + rank
        for rank, each in enumerate(found)
    ]


def train(
    task: Task,
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
    virtual = make(task.model(), ranks, lr)
    held = shares(y, ranks, task.batch, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.stack(
            [each[torch.randint(len(each), (task.batch,), generator=generator)] for each in held]
        )
        virtual.step(x[chosen], y[chosen])
    model = virtual.consensus_model()
    with torch.no_grad():
        logits = model(x_test)
    distance = virtual.consensus_distance()
    return {
        "lr": lr,
        "seed": seed,
        "accuracy": 100 * accuracy(model, (x_test, y_test)),
        "loss": F.cross_entropy(logits, y_test).item(),
        "distance": distance if math.isfinite(distance) else None,
    }


def next_rate(
    done: list[dict],
    rates: tuple[float, ...],
    seed: int,
    score: Callable[[dict], float],
) -> float | None:
    """Which learning rate this seed lacks; None where it lacks none."""
    if seed != SEEDS[0]:
        best = best_rate(done, score)
        return None if any(one["lr"] == best and one["seed"] == seed for one in done) else best
    tried = {one["lr"] for one in done if one["seed"] == seed}
    if missing := [lr for lr in rates if lr not in tried]:
        return missing[0]
    if best_rate(done, score) == min(tried):
        return float(f"{min(tried) / 3:.1g}")
    if best_rate(done, score) == max(tried):
        return float(f"{max(tried) * 3:.1g}")
    return None


def best_rate(done: list[dict], score: Callable[[dict], float]) -> float:
    """By the first seed."""
    return max((one for one in done if one["seed"] == SEEDS[0]), key=score)["lr"]


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """One learning rate for both of its parts."""
    return gg.Muon(model, lr, scale="match_rms_adamw")


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """With the moments that `gg.Muon` gives its own AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


ALL_REDUCE = {"all-reduce Muon": muon, "all-reduce AdamW": adamw}


def windows(text: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Characters, and those that follow them."""
    x, y = text.batch(indices.flatten())
    return x[:, :CONTEXT], y[:, :CONTEXT]


def stepper(name: str, model: GPT, ranks: int, lr: float) -> tuple[Any, Callable, Callable]:
    """An optimizer, a step on the windows of all ranks, and the model that is evaluated."""
    if name in ALL_REDUCE:
        optimizer = ALL_REDUCE[name](model, lr)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            training_loss(model, x, y).backward()
            optimizer.step()

        return optimizer, step, lambda: model
    virtual = SudaRanks(
        model,
        ranks,
        lr=lr,
        scale="match_rms_adamw",
        batching="loop",
        loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    )

    def steps(x: Tensor, y: Tensor) -> None:
        virtual.step(x.view(ranks, BATCH, -1), y.view(ranks, BATCH, -1))

    return virtual.optimizer, steps, virtual.consensus_model


def train_gpt(name: str, lr: float, ranks: int, steps: int, seed: int) -> dict[str, float]:
    """One run."""
    loaded = data.load("shakespeare")
    torch.manual_seed(seed)
    model = GPT(65, context=CONTEXT, layers=2, width=64)
    optimizer, step, evaluated = stepper(name, model, ranks, lr)
    scheduler = LambdaLR(optimizer, lambda k: min((k + 1) / (0.1 * steps), (1 - k / steps) / 0.9))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(loaded.train), (ranks * BATCH,), generator=generator)
        step(*windows(loaded.train, chosen))
        scheduler.step()
    with torch.no_grad():
        x, y = windows(loaded.test, torch.arange(len(loaded.test)))
        loss = training_loss(evaluated(), x, y).item()
    return {"lr": lr, "seed": seed, "loss": loss}


def search(
    held: dict[str, list[dict]],
    rates: dict[str, tuple[float, ...]],
    run: Callable[[str, float, int], dict],
    score: Callable[[dict], float],
    keep: Callable[[], object],
) -> None:
    """Runs what is missing of all contestants."""
    for seed in SEEDS:
        for name, tried in rates.items():
            done = held.setdefault(name, [])
            while (lr := next_rate(done, tried, seed, score)) is not None:
                done.append(run(name, lr, seed))
                print(f"{name:16} {done[-1]}", flush=True)
                keep()


def summary(held: dict[str, list[dict]], metric: str) -> dict[str, dict[str, Any]]:
    """Of each contestant, its best learning rate, and what its seeds came to with it."""
    rows = {}
    for name, done in held.items():
        best = best_rate(done, lambda one: one[metric] * (1 if metric == "accuracy" else -1))
        found = [one[metric] for one in done if one["lr"] == best]
        spread = round(statistics.stdev(found), 4) if len(found) > 1 else None
        mean = round(statistics.mean(found), 4)
        rows[name] = {"lr": best, "mean": mean, "standard_deviation": spread, metric: found}
    return rows


def main() -> None:
    """Fills the cells of one size, in `results/suda_heterogeneity.json` or `suda_gpt.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("question", choices=("heterogeneity", "gpt"))
    parser.add_argument("--task", choices=TASKS, default="mlp")
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, steps = options.ranks, options.steps
    name = f"suda_{options.question}"
    path = RESULTS / "raw" / f"{name}.json"
    metric = "accuracy" if options.question == "heterogeneity" else "loss"
    cells = json.loads(path.read_text())["raw"] if path.exists() else {}

    def keep() -> object:
        table = {size: summary(held, metric) for size, held in cells.items()}
        return write(name, {"alpha": ALPHA, "cells": table}, raw=cells, module="suda")

    if options.question == "gpt":
        held = cells.setdefault(f"{ranks} ranks, {steps} steps", {})
        rates = dict.fromkeys(("suda", *ALL_REDUCE), RATES)
        search(
            held,
            rates,
            lambda way, lr, seed: train_gpt(way, lr, ranks, steps, seed),
            lambda one: -one["loss"],
            keep,
        )
        return
    task = TASKS[options.task]
    parts = tuple(each for x, y in whole(task.data) for each in (task.view(x), y))
    search(
        cells.setdefault(f"{options.task}, {ranks} ranks, {steps} steps", {}),
        {way: rates for way, (_, rates) in WAYS.items()},
        lambda way, lr, seed: train(task, WAYS[way][0], lr, parts, ranks, steps, seed),
        lambda one: one["accuracy"],
        keep,
    )


if __name__ == "__main__":
    main()
