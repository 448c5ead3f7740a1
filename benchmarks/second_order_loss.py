"""Loss of second-order optimizers at equal steps and at equal time, against AdamW and gg.Muon.

A small GPT on Shakespeare (2 layers, width 64, context 64) and a perceptron on Fashion-MNIST of
14 x 14 pixels, one thread. The learning rate of every optimizer comes from the same search: 1e-3,
3e-3 and 1e-2 on the first seed, and the next one beyond while the best is at an edge; Muon's
updates are scaled as AdamW's. Warm-up in 5 % of the steps, then linear decay to zero. Seeds set
weights and batches, the same for all optimizers.

Reported for each: loss on held-out samples at the end; processor seconds a step of the optimizer
alone and of all; the share of steps after which it is where AdamW ends, in the same runs; the loss
of SOAP in shorter runs with a schedule of their own; and SOAP with roots that come late by 1, 3, 5
and 10 steps, exactly (`Deterministic`), every 10 steps.

    GOSSIPGRAD_DATA=... nice python -m benchmarks.second_order_loss
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import data, models

RATES = (1e-3, 3e-3, 1e-2)
CONTEXT = 64
EVALUATIONS = 25
Make = Callable[[nn.Module, float], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model, lr: torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01
    ),
    "Muon": lambda model, lr: gg.Muon(
        model, lr=lr, scale="match_rms_adamw", weight_decay=0.01, betas=(0.9, 0.95)
    ),
    "SOAP": lambda model, lr: gg.SOAP(model, lr=lr),
    "KLShampoo": lambda model, lr: gg.KLShampoo(model, lr=lr),
    "Shampoo": lambda model, lr: gg.Shampoo(model, lr=lr),
}


def late(steps: int) -> Make:
    """SOAP whose roots come so many steps late."""
    refresh = gg.Background(10, max_staleness=steps, executor=gg.Deterministic(steps))
    return lambda model, lr: gg.SOAP(model, lr=lr, refresh=refresh)


class Gpt:
    """A small GPT on Shakespeare."""

    def __init__(self, batch: int = 8) -> None:
        set_ = data.load("shakespeare")
        self.parts = [
            (torch.cat(list(inputs)).long(), torch.cat(list(labels)).long())
            for inputs, labels in (
                part.batch(torch.arange(len(part))) for part in (set_.train, set_.test)
            )
        ]
        self.vocabulary, self.batch = set_.info.num_classes, batch

    def model(self) -> nn.Module:
        """A new one."""
        return models.GPT(self.vocabulary, context=CONTEXT, layers=2, width=64, heads=4)

    def sample(self, part: int, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Random windows."""
        inputs, labels = self.parts[part]
        starts = torch.randint(len(inputs) - CONTEXT, (count,), generator=generator)
        places = starts[:, None] + torch.arange(CONTEXT)
        return inputs[places], labels[places]


class Perceptron:
    """A perceptron on Fashion-MNIST."""

    def __init__(self, batch: int = 128) -> None:
        set_ = data.load("fashion-mnist")
        self.parts = [
            (F.avg_pool2d(inputs.float(), 2), labels)
            for inputs, labels in (
                part.batch(torch.arange(len(part))) for part in (set_.train, set_.test)
            )
        ]
        self.batch = batch

    def model(self) -> nn.Module:
        """A new one."""
        return models.MLP(196, 10, hidden_size=64)

    def sample(self, part: int, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Random samples."""
        inputs, labels = self.parts[part]
        chosen = torch.randint(len(inputs), (count,), generator=generator)
        return inputs[chosen], labels[chosen].long()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def train(task: Any, make: Make, lr: float, steps: int, seed: int) -> dict[str, Any]:
    """One run: losses on held-out samples, at which steps, and processor seconds."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = make(model, lr)
    generator = torch.Generator().manual_seed(seed)
    held_out = task.sample(1, torch.Generator().manual_seed(7), 16 * task.batch)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm))
    )
    at, losses, seconds, in_step = [], [], 0.0, 0.0
    for step in range(1, steps + 1):
        batch = task.sample(0, generator, task.batch)
        start = time.process_time()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before = time.process_time()
        optimizer.step()
        end = time.process_time()
        seconds, in_step = seconds + end - start, in_step + end - before
        schedule.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            with torch.no_grad():
                at.append(step)
                losses.append(round(loss_of(model, held_out).item(), 5))
    if isinstance(optimizer, gg.second_order.SecondOrder):
        optimizer.close()
    return {"lr": lr, "at": at, "loss": losses, "seconds": seconds, "in_step": in_step}


def search(task: Any, make: Make, steps: int) -> tuple[float, dict[float, dict[str, Any]]]:
    """The best learning rate on the first seed, and all runs."""
    found = {lr: train(task, make, lr, steps, 0) for lr in RATES}
    while True:
        best = min(found, key=lambda lr: found[lr]["loss"][-1])
        if best == max(found) and best < 0.1:
            found[10 * sorted(found)[-2]] = train(task, make, 10 * sorted(found)[-2], steps, 0)
        elif best == min(found) and best > 1e-4:
            found[sorted(found)[1] / 10] = train(task, make, sorted(found)[1] / 10, steps, 0)
        else:
            return best, found


def train_all(task: Any, make: Make, lr: float, steps: int, seeds: range) -> list[dict[str, Any]]:
    """One run for each seed."""
    return [train(task, make, lr, steps, seed) for seed in seeds]


def reaches(run: dict[str, Any], loss: float, steps: int) -> float | None:
    """The share of steps after which a run is at this loss, between evaluations by a line."""
    before = (0, float("inf"))
    for at, value in zip(run["at"], run["loss"], strict=True):
        if value <= loss:
            fall = (before[1] - loss) / (before[1] - value) if before[1] < float("inf") else 1.0
            return (before[0] + fall * (at - before[0])) / steps
        before = at, value
    return None


def main() -> None:
    """Trains, and writes `results/second_order_loss.json` after each part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--tasks", default="gpt,mlp")
    parser.add_argument("--gpt-steps", type=int, default=300)
    parser.add_argument("--mlp-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"setting": vars(options)}
    for name in options.tasks.split(","):
        task = Gpt() if name == "gpt" else Perceptron()
        steps = options.gpt_steps if name == "gpt" else options.mlp_steps
        of: dict[str, Any] = {"optimizers": {}, "late": {}, "shorter": {}}
        figures[name] = of
        targets: list[float] = []

        for each, make in OPTIMIZERS.items():
            lr, tried = search(task, make, steps)
            runs = [tried[lr], *train_all(task, make, lr, steps, range(1, options.seeds))]
            finals = [one["loss"][-1] for one in runs]
            targets = targets or finals
            shares = [reaches(one, t, steps) for one, t in zip(runs, targets, strict=True)]
            per_step = statistics.median(one["seconds"] / steps for one in runs)
            in_step = statistics.median(one["in_step"] / steps for one in runs)
            of["optimizers"][each] = {
                "lr": lr,
                "searched": {str(k): v["loss"][-1] for k, v in sorted(tried.items())},
                "runs": runs,
                "final": finals,
                "mean": statistics.mean(finals),
                "share_of_steps": shares,
                "ms_a_step": 1e3 * per_step,
                "ms_in_optimizer": 1e3 * in_step,
            }
            print(
                f"{name} {each:10} lr {lr:g}: {statistics.mean(finals):.4f} {finals}, {shares}, "
                f"{1e3 * per_step:.1f} ms, of it {1e3 * in_step:.1f} in the optimizer",
                flush=True,
            )
            write("second_order_loss", figures)
        lr = of["optimizers"]["SOAP"]["lr"]
        for share in (0.6, 0.7):
            runs = train_all(task, OPTIMIZERS["SOAP"], lr, int(share * steps), range(options.seeds))
            finals = [one["loss"][-1] for one in runs]
            of["shorter"][share] = finals
            print(f"{name} SOAP in {share} of the steps: {finals}, AdamW {targets}", flush=True)
            write("second_order_loss", figures)
        for steps_late in (1, 3, 5, 10):
            runs = train_all(task, late(steps_late), lr, steps, range(options.seeds))
            finals = [one["loss"][-1] for one in runs]
            of["late"][steps_late] = finals
            print(f"{name} late {steps_late}: {statistics.mean(finals):.4f} {finals}", flush=True)
            write("second_order_loss", figures)


if __name__ == "__main__":
    main()
