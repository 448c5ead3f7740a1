"""Neuron apoptosis: parameters, processor time of the training, and accuracy, by seed.

One thread; "seconds" are processor time of training steps with all that `gg.shrink` does in them,
without evaluation. Controls: the same network without it ("whole"), and one that has the final
widths from the beginning ("control"): cheaper still, if one knew them.

Each run is kept in `results/raw/apoptosis/`: what was interrupted continues.

    python -m benchmarks.apoptosis [--cases fashion_mlp higgs] [--seeds 0 1 2] [--part 1.0]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import gossipgrad as gg
from benchmarks._common import RESULTS, made_by, once, tell, write
from benchmarks._tasks import GPT, ResNet20, folder, lenet, loss, mlp, pieces, shuffled, whole


class Task(NamedTuple):
    """What is trained, on what, and how."""

    model: Callable[..., nn.Module]  # by the widths of its hidden layers, or as wide as it begins
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float  # the largest of a one-cycle schedule, or of all steps
    steps: int
    metric: Callable[[Tensor, Tensor], float]  # of logits and labels; higher is better
    shrinks: dict[str, dict[str, Any]]  # by name, settings of `gg.shrink`
    controls: bool = False  # whether the widths can be given
    is_constant: bool = False  # the rate


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """In per cent."""
    return 100 * float((logits.argmax(-1) == labels).float().mean())


def area_under_curve(logits: Tensor, labels: Tensor) -> float:
    """In per cent, of the difference of two logits."""
    scores = (logits[:, 1] - logits[:, 0]).double()
    ranks = torch.empty_like(scores)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = labels == 1
    count = int(positive.sum())
    above = float(ranks[positive].sum()) - count * (count + 1) / 2
    return 100 * above / (count * (len(labels) - count))


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW with a decay of 0.01."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


def settings(
    steps: int, batches: int = 16, /, events: int = 10, **budgets: float
) -> dict[str, dict[str, Any]]:
    """Of `gg.shrink` by name: events at the first of 24 parts of a run."""
    every = steps // 24
    common = {"every": every, "batches": min(batches, every), "events": events}
    return {name: {**common, "budget": budget} for name, budget in budgets.items()}


def fashion_mlp(part: float) -> Task:
    train, test = whole("fashion-mnist")
    steps = int(part * 5 * len(train[0]) // 128)
    return Task(
        lambda widths=(1024, 1024): mlp(784, 10, *widths),
        *(train, test, 128, momentum, 0.05, steps, accuracy),
        settings(steps, events=5, careful=0.0008),
        controls=True,
    )


def fashion_mlp_constant(part: float) -> Task:
    """The same at a constant rate."""
    return fashion_mlp(part)._replace(is_constant=True)


def fashion_lenet(part: float) -> Task:
    train, test = whole("fashion-mnist")
    steps = int(part * 2 * len(train[0]) // 128)
    return Task(
        lambda widths=(32, 64, 256, 128): lenet(widths),
        *(train, test, 128, momentum, 0.05, steps, accuracy),
        settings(steps, events=5, careful=0.01),
        controls=True,
    )


def cifar_resnet(part: float) -> Task:
    train, test = whole("cifar10-small")
    steps = int(part * 3 * len(train[0]) // 64)
    common = {"every": steps // 20, "batches": min(16, steps // 20)}
    return Task(
        lambda: ResNet20(wider=2),
        *(train, test, 64, momentum, 0.05, steps, accuracy),
        {
            "careful": {**common, "budget": 0.2, "events": 3},
            "bold": {**common, "budget": 0.3, "events": 3},
        },
    )


def shakespeare_gpt(part: float) -> Task:
    train, (x, y) = pieces(0), pieces(1)
    return Task(
        lambda: GPT(layers=2, width=64),
        *(train, (x[:256], y[:256]), 16, adamw, 3e-3, int(part * 600)),
        lambda logits, labels: -float(loss(logits, labels)),
        settings(int(part * 600), 8, careful=0.01),
    )


def higgs(part: float) -> Task:
    rows = np.load(folder("higgs") / "higgs_23k.npz")
    x, y = torch.tensor(rows["x"]), torch.tensor(rows["y"]).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = (x - x[5000:].mean(0)) / x[5000:].std(0)
    steps = int(part * 12 * (len(x) - 5000) // 128)
    train, test = (x[5000:], y[5000:]), (x[:5000], y[:5000])
    return Task(
        lambda widths=(300, 300, 300): mlp(28, 2, *widths, dropout=0.2),
        *(train, test, 128, adamw, 3e-3, steps, area_under_curve),
        settings(steps, events=5, careful=0.008),
        controls=True,
    )


TASKS = {
    each.__name__: each
    for each in (
        fashion_mlp,
        fashion_mlp_constant,
        fashion_lenet,
        cifar_resnet,
        shakespeare_gpt,
        higgs,
    )
}


def train_once(
    task: Task, seed: int, settings: dict[str, Any] | None, widths: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """One training; what became of it."""
    torch.manual_seed(seed)
    model = task.model() if widths is None else task.model(widths)
    optimizer = task.optimizer(model.parameters(), task.lr)
    schedulers = torch.optim.lr_scheduler
    scheduler = (
        schedulers.ConstantLR(optimizer, 1.0)
        if task.is_constant
        else schedulers.OneCycleLR(optimizer, task.lr, total_steps=task.steps, cycle_momentum=False)
    )
    source = shuffled(task.train, task.batch, 1000 + seed)
    before = sum(p.numel() for p in model.parameters())
    start = time.process_time()
    session = None
    if settings is not None:
        session = gg.shrink(model, optimizer, example_input=task.train[0][:2], **settings)
    model.train()
    half_seconds = 0.0
    for step in range(task.steps):
        if step == task.steps // 2:
            half_seconds = time.process_time()
        x, y = next(source)
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    end = time.process_time()
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_before": before,
        "seconds": end - start,
        "seconds_of_later_steps": (end - half_seconds) / (task.steps - task.steps // 2),
    }
    if session is not None:
        stats = session.stats()
        found["shrink_seconds"] = stats.seconds
        found["widths"] = session.widths()
        found["spent"] = session.spent
        session.close()
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in task.test[0].split(256)])
    found["metric"] = task.metric(logits, task.test[1])
    return found


def compare(name: str, seeds: list[int], part: float) -> dict[str, Any]:
    """All variants of a task, seed by seed."""
    task = TASKS[name](part)
    runs: dict[str, list[dict[str, Any]]] = {}

    def run(variant: str, seed: int, *setting: Any) -> dict[str, Any]:
        path = RESULTS / "raw" / "apoptosis" / f"{name}_{variant}_{seed}.json".replace(" ", "_")
        found = once(path, {"part": part, "of": setting}, lambda: train_once(task, seed, *setting))
        runs.setdefault(variant, []).append(found)
        tell(f"{name} {variant} {seed}", found)
        return found

    for seed in seeds:
        run("whole", seed, None)
        for variant, settings in task.shrinks.items():
            narrow = run(variant, seed, settings)
            if task.controls:
                run(f"control of {variant}", seed, None, tuple(narrow["widths"].values()))
    ratios = {
        "times_fewer_parameters": "parameters",
        "times_less_processor_time": "seconds",
        "times_faster_later_steps": "seconds_of_later_steps",
    }
    table = {}
    for variant, each in runs.items():
        pairs = list(zip(runs["whole"], each, strict=True))
        table[variant] = {
            "metric": statistics.mean(run["metric"] for run in each),
            "metric_difference": statistics.mean(b["metric"] - a["metric"] for a, b in pairs),
            **{
                name: statistics.mean(a[key] / b[key] for a, b in pairs)
                for name, key in ratios.items()
            },
        }
    return {"steps": task.steps, "settings": task.shrinks, "table": table, "runs": runs}


def main() -> None:
    """Runs what is asked for, and keeps what was found of the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--part", type=float, default=1.0, help="of the steps, for a try")
    parser.add_argument("--out", type=Path, default=RESULTS / "apoptosis.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cases:
        found = compare(name, options.seeds, options.part)
        raw = found.pop("runs")
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        cases = {**before.get("cases", {}), name: {**made_by("apoptosis"), **found}}
        write("apoptosis", {"cases": cases}, raw=raw, path=options.out)


if __name__ == "__main__":
    main()
