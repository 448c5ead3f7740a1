"""Which settings of gossip keep all-reduce's accuracy at equal epochs? With virtual ranks.

Every contestant sees the same samples in the same steps. Its learning rate is the best of a grid
of factors of 2, by the loss of a seed that is not among the reported ones, and further ones while
the best is at an edge. Then it runs with three seeds, and with further ones until the 95 %
interval of its difference to the first contestant, paired by seed, is at most 0.2 points (0.02
nats); until then the verdict is "undecided". What is evaluated is the mean of all
replicas, on the test part. Warm-up in the first 5 % of the steps, then a cosine to 0. `bytes` are
what a rank sends in a step, in sizes of the model; ring all-reduce sends `2 (p - 1) / p`.

The tasks `drift`, `staleness` and `shared_mask` have one learning rate for all, and tell how far
replicas are apart. Runs that are done are kept.

    python -m benchmarks.equal_accuracy                             # mlp, mlp-adam
    python -m benchmarks.equal_accuracy --tasks lenet --ranks 8
    python -m benchmarks.equal_accuracy --tasks drift staleness shared_mask
    python -m benchmarks.equal_accuracy --tasks topology --seeds 10
    python -m benchmarks.equal_accuracy --processes accuracy        # or workloads

The last one runs `gossipgrad train` on real processes, with equal rates.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gossipgrad as gg
from benchmarks import _command
from benchmarks._common import best_rate, merged, once, paired, tell, verdict, write
from benchmarks._tasks import (
    GPT,
    ResNet20,
    cosine,
    evaluate,
    lenet,
    loss,
    mlp,
    shuffled,
    whole,
    windows,
)
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import Schedule, dissemination, matching

SEEDS, MOST_SEEDS, SEARCH_SEED, CONTEXT = 3, 16, 100, 64
MARGINS = {"accuracy": 0.2, "loss": 0.02}  # points, nats
Mix = Callable[[int, Tensor], int]
"""Mixes replicas, the rows of a matrix, after a step; the elements that each rank sent."""


def every_tenth(step: int, w: Tensor) -> int:
    """All weights in every tenth step."""
    if step % 10 < 9:
        return 0
    w.copy_(0.5 * (w + w[partners(dissemination(len(w)), step // 10)]))
    return w.shape[1]


def masked(density: float) -> Mix:
    """The coordinates of `gg.SharedMask`."""
    mask = gg.SharedMask(density)

    def mix(step: int, w: Tensor) -> int:
        at = mask.indices(w.shape[1], seed=0, round=step)
        chosen = w[:, at]
        w[:, at] = 0.5 * (chosen + chosen[partners(dissemination(len(w)), step)])
        return mask.largest_count(w.shape[1])

    return mix


def partners(schedule: Schedule, round: int) -> Tensor:
    """The rank from which each one receives."""
    return torch.from_numpy(schedule.round_peers(round).recv_from)


# By contestant: sizes of the model that a rank sends in a step, and settings of `VirtualRanks`;
# `rule` is `gg.GossipAdamW`, `mix` takes the place of an exchange.
Ways = dict[str, tuple[float, dict[str, Any]]]
ALL_REDUCE: Ways = {"all-reduce": (2, {"strategy": "allreduce"})}
OVERLAP: Ways = {"overlap, weights": (1, {})}
SYNC: Ways = {"sync, weights": (1, {"mode": "sync"})}
MOMENTUM = {"mode": "sync", "payload": "weights+momentum"}
CORRECTED = {"mode": gg.Sync(momentum=0.9), "wire_dtype": torch.bfloat16, "topology": "matching"}
NARROW: Ways = {
    "sync with momentum, bf16 wire": (0.5, CORRECTED),
    "sync with momentum, bf16 wire, two exchanges": (1, CORRECTED | {"exchanges": 2}),
    "sync with momentum and overlap, bf16 wire": (
        1,
        CORRECTED | {"mode": gg.Sync(momentum=0.9, overlap=True), "exchanges": 2},
    ),
}
SGD: Ways = ALL_REDUCE | OVERLAP | SYNC | NARROW
SGD |= {
    "overlap, momentum": (2, {"payload": "weights+momentum"}),
    "sync, momentum": (2, MOMENTUM),
    "sync, momentum, two exchanges": (4, MOMENTUM | {"exchanges": 2}),
}
ADAM: Ways = ALL_REDUCE | OVERLAP | SYNC | NARROW
ADAM |= {
    "all-reduce, GossipAdamW": (2, {"strategy": "allreduce", "rule": True}),
    "sync, state": (3, {"mode": "sync", "payload": "weights+state"}),
    "sync, GossipAdamW": (2, MOMENTUM | {"rule": True}),
    "sync, GossipAdamW, two exchanges": (4, MOMENTUM | {"exchanges": 2, "rule": True}),
}
LOCAL: Ways = {"no communication": (0, {"strategy": "local"})}
DRIFT: Ways = SYNC | OVERLAP | LOCAL
DRIFT |= {
    "overlap, weights+state": (2, {"payload": "weights+state"}),
    "the authors' rule": (1, {"mode": "lagged"}),
}
TOPOLOGIES: Ways = ALL_REDUCE | {
    f"overlap, {name}": (1, {"mode": "overlap", "topology": name})
    for name in ("dissemination", "matching")
}
STALE: Ways = ALL_REDUCE | OVERLAP
STALE |= {
    f"stale, {when}, d = {d}": (
        1,
        {"mode": gg.Stale(max_staleness=d), "delay": d * (when == "late")},
    )
    for d in (0, 1, 2, 4, 8)
    for when in ("late", "in time")
}
MASKS: Ways = SYNC | LOCAL
MASKS |= {
    "all weights, every=10": (0.1, {"mix": every_tenth}),
    "SharedMask(0.1)": (0.1, {"mix": masked(0.1)}),
    "SharedMask(0.01)": (0.01, {"mix": masked(0.01)}),
}


class Task(NamedTuple):
    """What is trained, by which contestants; `rates` are searched unless there is one."""

    data: str
    model: Callable[[], nn.Module]
    ways: Ways
    batch: int  # samples of all ranks in a step
    steps: int
    rates: tuple[float, ...]
    ranks: tuple[int, ...] = (8, 32, 128)
    distances_at: tuple[int, ...] = ()
    is_constant: bool = False  # the learning rate


TASKS = {
    "mlp": Task("fashion-mnist", lambda: mlp(784, 10), SGD, 2048, 580, (0.1, 0.2)),
    "mlp-adam": Task("fashion-mnist", lambda: mlp(784, 10), ADAM, 512, 468, (0.01, 0.02), (32,)),
    "lenet": Task("fashion-mnist", lenet, SGD, 1024, 580, (0.05, 0.1), (8, 32)),
    "resnet20": Task("cifar10-small", ResNet20, SGD, 256, 160, (0.1, 0.2), (8,)),
    "gpt": Task(
        "shakespeare",
        lambda: GPT(context=CONTEXT, layers=2, width=64),
        *(ADAM, 64, 400, (0.004, 0.008), (8, 32)),
    ),
    "drift": Task(
        *("digits", lambda: mlp(64, 10), DRIFT, 128, 1000, (0.1,), (4, 8)),
        distances_at=(10, 20, 50, 100),
        is_constant=True,
    ),
    "topology": Task("digits", lambda: mlp(64, 10), TOPOLOGIES, 256, 600, (0.05, 0.1), (8, 32)),
    "staleness": Task("fashion-mnist", lambda: mlp(784, 10), STALE, 512, 702, (0.05,), (8,)),
    "shared_mask": Task("fashion-mnist", lenet, MASKS, 256, 702, (0.05,), (8,)),
}


def batches(task: Task, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of each step."""
    if task.data != "shakespeare":
        return islice(shuffled(whole(task.data)[0], task.batch, seed), task.steps)
    generator = torch.Generator().manual_seed(seed)
    return (windows(0, generator, task.batch, CONTEXT) for _ in range(task.steps))


def optimizer_of(way: dict[str, Any], task: Task, rate: float) -> Callable[[Any], Any]:
    """Makes the optimizer of all replicas."""
    if task.ways is not ADAM:
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    kind = gg.GossipAdamW if way.get("rule") else torch.optim.AdamW
    return lambda parameters: kind(parameters, lr=rate, weight_decay=0.01)


def train(task: Task, ranks: int, way: dict[str, Any], rate: float, seed: int) -> dict[str, Any]:
    """One run: accuracy and loss of the mean of all replicas, and their distance to it."""
    options = {key: value for key, value in way.items() if key not in ("rule", "mix")}
    if isinstance(options.get("mode"), gg.Stale):
        options["topology"] = matching(ranks, seed=seed)
    elif "strategy" not in options and "mix" not in way:
        options.setdefault("topology", "dissemination")
    torch.manual_seed(seed)
    replicas = VirtualRanks(
        task.model(),
        ranks,
        optimizer=optimizer_of(way, task, rate),
        loss=loss,
        **({"strategy": "local"} if "mix" in way else {}),
        **options,
    )
    parameters = [p.detach() for p in replicas.optimizer.param_groups[0]["params"]]
    began, warm_up, losses, distances = time.perf_counter(), max(1, task.steps // 20), [], {}
    for step, (x, y) in enumerate(batches(task, seed)):
        for group in replicas.optimizer.param_groups:
            group["lr"] = rate if task.is_constant else cosine(rate, step, task.steps, warm_up)
        parts = (part.reshape(ranks, -1, *part.shape[1:]) for part in (x, y))
        losses.append(float(replicas.step(*parts).mean()))
        if mix := way.get("mix"):
            w = torch.cat([p.view(ranks, -1) for p in parameters], 1)
            mix(step, w)
            sizes = [p[0].numel() for p in parameters]
            for p, part in zip(parameters, w.split(sizes, 1), strict=True):
                p.view(ranks, -1).copy_(part)
        if step + 1 in task.distances_at or (step + 1) % (task.steps // 10) == 0:
            distances[step + 1] = round(replicas.consensus_distance(), 5)
    is_text = task.data == "shakespeare"
    fixed = torch.Generator().manual_seed(0)
    test = windows(1, fixed, 1000, CONTEXT) if is_text else whole(task.data)[1]
    found: dict[str, Any] = evaluate(replicas.consensus_model(), test)
    found |= {"train_loss_50": losses[min(49, len(losses) - 1)], "distance": distances}
    found["mean_distance"] = statistics.fmean(distances.values())
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def row(
    name: str,
    task: Task,
    ranks: int,
    way: str,
    seeds: tuple[int, int],
    reference: Callable[[int], float] | None,
    folder: Path,
) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Figures of a contestant with their difference to the reference, and its figure by seed.

    Takes at least the first and at most the second number of seeds.
    """
    sent, options = task.ways[way]
    setting = {"steps": task.steps, "batch": task.batch}

    def run(rate: float, seed: int = SEARCH_SEED) -> dict[str, Any]:
        path = folder / name / f"{ranks}-{way}-{rate:g}-{seed}.json".replace(" ", "")
        return once(path, setting, lambda: train(task, ranks, options, rate, seed))

    metric, sign = ("loss", 1) if task.data == "shakespeare" else ("accuracy", -1)
    rate = task.rates[0]
    if len(task.rates) > 1:
        rate = best_rate(task.rates, lambda rate: sign * run(rate)[metric], 2.0)[0]

    def result(seed: int) -> float:
        return run(rate, seed)[metric]

    reference, (count, most) = reference or result, seeds
    while True:
        values = [result(seed) for seed in range(count)]
        found = paired(values, [reference(seed) for seed in range(count)])
        means = verdict(**found, margin=MARGINS[metric], higher=metric == "accuracy")
        if means != "undecided" or count >= most:
            break
        count += 1
    runs = [run(rate, seed) for seed in range(count)]
    figures: dict[str, Any] = {"task": name, "ranks": ranks, "way": way, "rate": rate}
    figures |= {"metric": metric, "bytes": sent, "mean": round(statistics.mean(values), 3)}
    figures |= found | {"verdict": means, "seeds": [*range(count)], metric: values}
    for key in ("train_loss_50", "mean_distance"):
        figures[key] = round(statistics.fmean(each[key] for each in runs), 4)
    tables = [{str(step): far for step, far in each["distance"].items()} for each in runs]
    of_steps = {step: statistics.fmean(table[step] for table in tables) for step in tables[0]}
    figures["distance"] = {step: round(mean, 4) for step, mean in of_steps.items()}
    return figures, result


def main() -> None:
    """Runs what is asked for and not done, and writes after each contestant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["mlp", "mlp-adam"], choices=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--ways", nargs="+", help="contestants; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="at least")
    parser.add_argument("--most-seeds", type=int, default=MOST_SEEDS)
    parser.add_argument("--steps", type=int, help="for a try")
    parser.add_argument("--folder", type=Path, default=Path("runs/equal_accuracy"))
    parser.add_argument("--processes", choices=_command.GROUPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.processes:
        return print(_command.compare(options.processes, options.seeds))
    every = {way for name in options.tasks for way in TASKS[name].ways}
    if unknown := {*(options.ways or ())} - every:
        parser.error(f"--ways {unknown.pop()!r}: choose among {', '.join(sorted(every))}")
    rows: list[dict[str, Any]] = []
    for name in options.tasks:
        task = TASKS[name]._replace(**({"steps": options.steps} if options.steps else {}))
        for ranks in options.ranks or task.ranks:
            first = next(iter(task.ways))
            reference: Callable[[int], float] | None = None
            for way in dict.fromkeys(
                [first, *(w for w in options.ways or task.ways if w in task.ways)]
            ):
                seeds = options.seeds, max(options.seeds, options.most_seeds)
                figures, result = row(name, task, ranks, way, seeds, reference, options.folder)
                rows.append(figures)
                reference = reference or result
                tell("", rows[-1])
                published = merged("equal_accuracy", rows, "task", "ranks", "way")
                write("equal_accuracy", {"rows": published})
    return None


if __name__ == "__main__":
    main()
