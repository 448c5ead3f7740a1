"""Second-order optimizers: loss at equal steps, and how even their steps are.

* `loss`: a small GPT on Shakespeare (2 layers, width 64, context 64) and a perceptron on
  Fashion-MNIST of 14 x 14 pixels, one thread. Every optimizer has its learning rate from one
  search, on the first seed. Warm-up in 5 % of the steps, then linear decay to zero. Reported: the
  loss on held-out samples, processor milliseconds a step, the share of steps after which each is
  where AdamW ends, and SOAP with roots that are 1, 3, 5 and 10 steps late.
* `spikes`: gg.SOAP on a small GPT whose matrices are blocks of 512, on one thread of compute, so
  that on two cores one is free for a worker; by turns, a window of steps at a time, from equal
  weights on equal batches. Reported: the 99th percentile over the median of a step's wall time,
  the longest step, and the wall time of all.

    python -m benchmarks.second_order loss
    python -m benchmarks.second_order spikes
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import best_rate, spread, tell, write
from benchmarks._tasks import GPT, Part, loss, mlp, whole, windows

STEPS, SEEDS = 300, 3
RATES = (1e-3, 3e-3, 1e-2)
CONTEXT = 64
EVALUATIONS = 25
LATE = (1, 3, 5, 10)
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

    batch = 8

    def model(self) -> nn.Module:
        """A new one."""
        return GPT(context=CONTEXT, layers=2, width=64)

    def sample(self, part: int, generator: torch.Generator, count: int) -> Part:
        """Random windows."""
        return windows(part, generator, count, CONTEXT)


class Perceptron:
    """A perceptron on Fashion-MNIST."""

    batch = 128

    def __init__(self) -> None:
        self.parts = [(F.avg_pool2d(x, 2), y) for x, y in whole("fashion-mnist")]

    def model(self) -> nn.Module:
        """A new one."""
        return mlp(196, 10, 64, 64)

    def sample(self, part: int, generator: torch.Generator, count: int) -> Part:
        """Random samples."""
        inputs, labels = self.parts[part]
        chosen = torch.randint(len(inputs), (count,), generator=generator)
        return inputs[chosen], labels[chosen]


def train(task: Any, make: Make, lr: float, steps: int, seed: int) -> dict[str, Any]:
    """One run: losses on held-out samples, at which steps, and processor seconds."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = make(model, lr)
    generator = torch.Generator().manual_seed(seed)
    x, y = task.sample(1, torch.Generator().manual_seed(7), 16 * task.batch)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm))
    )
    at, losses, seconds, in_step = [], [], 0.0, 0.0
    for step in range(1, steps + 1):
        inputs, labels = task.sample(0, generator, task.batch)
        start = time.process_time()
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        before = time.process_time()
        optimizer.step()
        end = time.process_time()
        seconds, in_step = seconds + end - start, in_step + end - before
        schedule.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            with torch.no_grad():
                at.append(step)
                losses.append(round(loss(model(x), y).item(), 5))
    if isinstance(optimizer, gg.second_order.SecondOrder):
        optimizer.close()
    return {"lr": lr, "at": at, "loss": losses, "seconds": seconds, "in_step": in_step}


def reaches(run: dict[str, Any], target: float, steps: int) -> float | None:
    """The share of steps after which a run is at this loss, between evaluations by a line."""
    before = (0, float("inf"))
    for at, value in zip(run["at"], run["loss"], strict=True):
        if value <= target:
            fall = (before[1] - target) / (before[1] - value) if before[1] < float("inf") else 1.0
            return (before[0] + fall * (at - before[0])) / steps
        before = at, value
    return None


def measure_loss(steps: int, seeds: int) -> None:
    """Trains, and writes `results/second_order_loss.json` after each part."""
    figures: dict[str, Any] = {"setting": {"steps": steps, "seeds": seeds}}
    for name, kind in (("gpt", Gpt), ("mlp", Perceptron)):
        task, targets = kind(), list[float]()
        found: dict[str, Any] = {"optimizers": {}, "late": {}}
        figures[name] = found
        for each, make in OPTIMIZERS.items():
            first: dict[float, dict[str, Any]] = {}

            def final(lr: float, make: Make = make, first: Any = first, task: Any = task) -> float:
                first[lr] = train(task, make, lr, steps, 0)
                return first[lr]["loss"][-1]

            lr, tried = best_rate(RATES, final, 3.0)
            runs = [first[lr], *(train(task, make, lr, steps, seed) for seed in range(1, seeds))]
            finals = [run["loss"][-1] for run in runs]
            targets = targets or finals
            found["optimizers"][each] = {
                "lr": lr,
                "searched": {str(k): v for k, v in sorted(tried.items())},
                "final": finals,
                "mean": statistics.mean(finals),
                "share_of_steps": [
                    reaches(one, target, steps) for one, target in zip(runs, targets, strict=True)
                ],
                "ms_a_step": 1e3 * statistics.median(one["seconds"] / steps for one in runs),
                "ms_in_optimizer": 1e3 * statistics.median(one["in_step"] / steps for one in runs),
            }
            tell(f"{name} {each}", found["optimizers"][each])
            write("second_order_loss", figures, module="second_order")
        for late_by in LATE:
            lr = found["optimizers"]["SOAP"]["lr"]
            runs = [train(task, late(late_by), lr, steps, seed) for seed in range(seeds)]
            found["late"][late_by] = [one["loss"][-1] for one in runs]
            tell(f"{name} late", found["late"])
            write("second_order_loss", figures, module="second_order")


EVERY, STALENESS, WINDOW = 10, 5, 20
POLICIES = {
    "synchronous": gg.Synchronous(EVERY),
    "staggered": gg.Staggered(EVERY),
    "background": gg.Background(EVERY, STALENESS),
    "background, fixed delay": gg.Background(EVERY, STALENESS, fixed_delay=True),
}


class Contestant:
    """A model, its optimizer, and what has been measured of its steps."""

    def __init__(self, policy: Any) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers=1, width=512, heads=8)
        self.optimizer = gg.SOAP(self.model, lr=1e-3, max_dim=512, refresh=policy)
        self.data = torch.Generator().manual_seed(1)
        self.walls: list[float] = []
        self.total = self.cpu = 0.0

    def step(self) -> None:
        """On a text to learn: each character is the sum of the two before it."""
        x = torch.randint(65, (1, 130), generator=self.data)
        for position in range(2, 130):
            x[:, position] = (x[:, position - 1] + x[:, position - 2]) % 65
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss(self.model(x[:, 1:-1]), x[:, 2:]).backward()
        self.optimizer.step()
        self.walls.append(time.perf_counter() - start)

    def window(self, *, counts: bool) -> None:
        """Some steps; the first ones do not count."""
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(WINDOW):
            self.step()
        self.optimizer.refresher.drain()
        if counts:
            self.total += time.perf_counter() - start
            self.cpu += time.process_time() - cpu
        else:
            self.walls.clear()

    def figures(self) -> dict[str, Any]:
        """Of all steps that count."""
        found = spread(self.walls)
        return {
            **{f"{name}_ms": 1e3 * value for name, value in found.items()},
            "p99_over_median": found["p99"] / found["median"],
            "wall_seconds": self.total,
            "cpu_seconds": self.cpu,
            "steps": len(self.walls),
        }


def measure_spikes(rounds: int) -> None:
    """Measures by turns, and writes `results/second_order_spikes.json`."""
    contestants = {policy: Contestant(value) for policy, value in POLICIES.items()}
    for turn in range(rounds + 1):
        for contestant in contestants.values():
            contestant.window(counts=turn > 0)
    found = {policy: each.figures() for policy, each in contestants.items()}
    for policy, figures in found.items():
        tell(policy, {key: round(value, 3) for key, value in figures.items()})
    for each in contestants.values():
        each.optimizer.close()
    figures = {"seed": 0, "figures": {"SOAP": found}}
    print(write("second_order_spikes", figures, module="second_order"))


def main() -> None:
    """Answers one question."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("question", choices=("loss", "spikes"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run of `loss`")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=2, help="of `spikes`, 20 steps each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.question == "loss":
        measure_loss(options.steps, options.seeds)
    else:
        measure_spikes(options.rounds)


if __name__ == "__main__":
    main()
