"""Which settings of gossip keep all-reduce's accuracy at equal epochs? With virtual ranks.

Every contestant sees the same samples in the same steps. Its learning rate is the best of a grid
of factors of 2, by the accuracy of a seed that is not among the reported ones, and further ones
while the best is at an edge. Then it runs with three seeds. What is evaluated is the mean of all
replicas, on the test part. Warm-up in the first 5 % of the steps, then a cosine to 0.

`bytes` are what a rank sends in a step, in sizes of the model; ring all-reduce sends
`2 (p - 1) / p`.

Runs that are done are kept in `results/raw`, and not run again:

    GOSSIPGRAD_DATA=... python -m benchmarks.equal_accuracy
    GOSSIPGRAD_DATA=... python -m benchmarks.equal_accuracy --tasks mlp --ranks 8 32
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import RESULTS, half_width_95, write
from benchmarks._tasks import Part, Text, accuracy, cosine, whole
from gossipgrad import data, models
from gossipgrad.simulate import VirtualRanks

SEEDS = (0, 1, 2)
SEARCH_SEED = 100
NAME = "equal_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, for how long, by which optimizer.

    Attributes:
        batch: Samples of all ranks in a step.
        rates: Where the search begins.
    """

    data: str
    model: str
    optimizer: str
    batch: int
    steps: int
    rates: tuple[float, ...]


def _task(data: str, model: str, optimizer: str, batch: int, steps: int, *rates: float) -> Task:
    return Task(data=data, model=model, optimizer=optimizer, batch=batch, steps=steps, rates=rates)


TASKS = {
    "mlp": _task("fashion-mnist", "mlp", "sgd", 2048, 580, 0.1, 0.2),
    "mlp-adam": _task("fashion-mnist", "mlp", "adam", 512, 468, 0.01, 0.02),
    "lenet": _task("fashion-mnist", "lenet", "sgd", 1024, 290, 0.1, 0.2),
    "resnet20": _task("cifar10-small", "resnet20", "sgd", 256, 160, 0.1, 0.2),
    "gpt": _task("shakespeare", "gpt", "adam", 64, 400, 0.004, 0.008),
}
CONTEXT = 64

# Bytes a step in sizes of the model, and what VirtualRanks is asked for.
SGD: dict[str, tuple[float, dict[str, Any]]] = {
    "all-reduce": (2, {"strategy": "allreduce"}),
    "overlap, weights": (1, {}),
    "overlap, momentum": (2, {"payload": "weights+momentum"}),
    "sync, weights": (1, {"mode": "sync"}),
    "sync, momentum": (2, {"mode": "sync", "payload": "weights+momentum"}),
    "sync, momentum, two exchanges": (
        4,
        {"mode": "sync", "payload": "weights+momentum", "exchanges": 2},
    ),
}
ADAM: dict[str, tuple[float, dict[str, Any]]] = {
    "all-reduce": (2, {"strategy": "allreduce"}),
    "all-reduce, GossipAdamW": (2, {"strategy": "allreduce", "rule": True}),
    "overlap, weights": (1, {}),
    "sync, weights": (1, {"mode": "sync"}),
    "sync, state": (3, {"mode": "sync", "payload": "weights+state"}),
    "sync, GossipAdamW": (
        2,
        {"mode": "sync", "payload": "weights+momentum", "rule": True},
    ),
    "sync, GossipAdamW, two exchanges": (
        4,
        {"mode": "sync", "payload": "weights+momentum", "exchanges": 2, "rule": True},
    ),
}


class Images:
    """Fashion-MNIST or CIFAR-10 small, shuffled anew in each epoch."""

    def __init__(self, task: Task) -> None:
        self.info, self.name = data.info(task.data), task.model
        (self.x, self.y), self.test = whole(task.data)

    def model(self) -> nn.Module:
        """A new one."""
        return models.build(self.name, self.info)

    def batches(self, task: Task, seed: int) -> Iterator[Part]:
        """Inputs and labels of each step."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(task.steps):
            if len(order) < task.batch:
                order = torch.randperm(len(self.x), generator=generator)
            taken, order = order[: task.batch], order[task.batch :]
            yield self.x[taken], self.y[taken]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Percent and nats on the test part."""
        x, y = self.test
        with torch.inference_mode():
            outputs = torch.cat([model(part) for part in x.split(1000)])
        return {"accuracy": 100 * accuracy(model, self.test), "loss": float(loss(outputs, y))}


class Windows:
    """Random windows of tiny Shakespeare."""

    def __init__(self, task: Task) -> None:
        self.text = Text(CONTEXT)

    def model(self) -> nn.Module:
        """Two layers of width 64."""
        return models.GPT(self.text.vocabulary, context=CONTEXT, layers=2, width=64, heads=4)

    def batches(self, task: Task, seed: int) -> Iterator[Part]:
        """Inputs and labels of each step."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(task.steps):
            yield self.text.windows(0, generator, task.batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nats on 1,000 windows of the test part, the same for all."""
        x, y = self.text.windows(1, torch.Generator().manual_seed(0), 1000)
        with torch.inference_mode():
            pairs = zip(x.split(100), y.split(100), strict=True)
            losses = [loss(model(inputs), labels) for inputs, labels in pairs]
        return {"loss": float(torch.stack(losses).mean())}


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of one rank."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def maker(task: Task, rate: float, *, rule: bool) -> Callable[[list[nn.Parameter]], Optimizer]:
    """The optimizer of all replicas."""
    if task.optimizer == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    kind = gg.GossipAdamW if rule else torch.optim.AdamW
    return lambda parameters: kind(parameters, lr=rate, weight_decay=0.01)


def train(task: Task, source: Any, ranks: int, way: dict[str, Any], rate: float, seed: int):
    """One run; accuracy of the mean of all replicas."""
    options = dict(way)
    rule = options.pop("rule", False)
    torch.manual_seed(seed)
    replicas = VirtualRanks(
        source.model(),
        ranks,
        optimizer=maker(task, rate, rule=rule),
        loss=loss,
        batching="loop" if task.model == "gpt" and "strategy" not in way else "auto",
        seed=seed if options.get("strategy") is None else 0,
        **options,
    )
    began, warmup = time.perf_counter(), max(1, task.steps // 20)
    for step, (x, y) in enumerate(source.batches(task, seed)):
        for group in replicas.optimizer.param_groups:
            group["lr"] = cosine(rate, step, task.steps, warmup)
        replicas.step(*(part.reshape(ranks, -1, *part.shape[1:]) for part in (x, y)))
    found = source.evaluate(replicas.consensus_model().eval())
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def is_better(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether a run ended better; one that diverged is worse than any."""
    if "accuracy" in one:
        return one["accuracy"] > other["accuracy"]
    return one["loss"] < other["loss"] or math.isnan(other["loss"])


class Runs:
    """Runs that are done, by name; each is written as soon as it is."""

    def __init__(self) -> None:
        published, raw = (folder / f"{NAME}.json" for folder in (RESULTS, RESULTS / "raw"))
        self.rows = json.loads(published.read_text())["rows"] if published.exists() else []
        self.done = json.loads(raw.read_text())["raw"] if raw.exists() else {}
        self.sources: dict[str, Any] = {}

    def run(self, name: str, ranks: int, way: str, rate: float, seed: int) -> dict[str, float]:
        """What a run came to."""
        key = f"{name}/{ranks}/{way}/{rate:g}/{seed}"
        if key not in self.done:
            task = TASKS[name]
            if name not in self.sources:
                self.sources[name] = (Windows if task.model == "gpt" else Images)(task)
            options = ways(task)[way][1]
            self.done[key] = train(task, self.sources[name], ranks, options, rate, seed)
            print(key, self.done[key], flush=True)
            write(NAME, {"rows": self.rows}, raw=self.done)
        return self.done[key]


def ways(task: Task) -> dict[str, tuple[float, dict[str, Any]]]:
    """The contestants of a task."""
    return SGD if task.optimizer == "sgd" else ADAM


def best_rate(runs: Runs, name: str, ranks: int, way: str) -> float:
    """Of a grid of factors of 2 that is extended while its best is at an edge."""
    rates = list(TASKS[name].rates)
    while True:
        found = {rate: runs.run(name, ranks, way, rate, SEARCH_SEED) for rate in rates}
        best = rates[0]
        for rate in rates[1:]:
            best = rate if is_better(found[rate], found[best]) else best
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(best * 2)
        else:
            return best


def row(runs: Runs, name: str, ranks: int, way: str, seeds: int) -> dict[str, Any]:
    """Figures of a contestant, and their paired difference to all-reduce's."""
    key = "loss" if TASKS[name].model == "gpt" else "accuracy"

    def of(one: str) -> tuple[float, list[float]]:
        rate = best_rate(runs, name, ranks, one)
        return rate, [runs.run(name, ranks, one, rate, seed)[key] for seed in SEEDS[:seeds]]

    rate, values = of(way)
    differences = [a - b for a, b in zip(values, of("all-reduce")[1], strict=True)]
    figures = {"task": name, "ranks": ranks, "way": way, "rate": rate, "metric": key}
    figures |= {"bytes": ways(TASKS[name])[way][0], "mean": round(statistics.mean(values), 3)}
    figures["difference"] = round(statistics.mean(differences), 3)
    if len(values) == len(SEEDS):
        figures["interval"] = round(half_width_95(differences) or 0.0, 3)
    return figures


def main() -> None:
    """Runs what is asked for and not done; writes the rows of all that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--ways", nargs="+", help="contestants; all by default")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    runs, rows = Runs(), []
    for name in asked.tasks:
        for ranks in asked.ranks:
            for way in ways(TASKS[name]):
                if TASKS[name].batch % ranks == 0 and (not asked.ways or way in asked.ways):
                    rows.append(row(runs, name, ranks, way, asked.seeds))
                    print(rows[-1], flush=True)
    new = {(each["task"], each["ranks"], each["way"]) for each in rows}
    kept = [each for each in runs.rows if (each["task"], each["ranks"], each["way"]) not in new]
    write(NAME, {"rows": kept + rows}, raw=runs.done)


if __name__ == "__main__":
    main()
