"""Seconds to accuracy of the default of `gg.sparsify` and of DDP, warm-up and planning included.

A perceptron on Fashion-MNIST, 4, 8 and 16 hosts, 100 Mbit/s and 1 Gbit/s. Seconds are those of the
laboratory, from the first step on: every step of one training with the default, and steps of DDP
before and after it on the same hosts. Hosts share this machine's cores. Accuracies are those of
virtual ranks, three seeds paired, each step of the density at which the laboratory has sent it.
Cells that are done are kept. Needs Linux and root for the steps.

    python -m benchmarks.sparse_seconds steps       # some 10 minutes
    python -m benchmarks.sparse_seconds accuracy    # of what was measured; writes the table
"""

import argparse
import json
import statistics
import sys
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import CpuBusy, once, paired, tell, write, write_json
from benchmarks._tasks import cosine, evaluate, loss, whole
from benchmarks.network import Network, run_everywhere
from benchmarks.sparse import DEFAULT_DENSITY, SparsifiedRanks

BATCH, STEPS, DDP_STEPS, PEAK_LR = 256, 5 * 234, 30, 0.1
EVALUATED, LOOKED = 39, 13  # steps from one evaluation, or look at what is sent, to the next
LESS = 0.005  # that the target is below the accuracy of dense gradients
SEEDS = 3


class Cell(NamedTuple):
    """A network."""

    world_size: int
    rate: float  # bits a second of each link

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.world_size}-{self.rate / 1e6:g}"


CELLS = tuple(Cell(p, rate) for p in (4, 8, 16) for rate in (1e8, 1e9))


def perceptron() -> nn.Module:
    """270,000 parameters: to all-reduce their gradients takes some 0.15 s at 100 Mbit/s."""
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise((784, 256, 256, 10))]
    return nn.Sequential(nn.Flatten(), *chain.from_iterable(layers))[:-1]


def sgd(model: nn.Module) -> Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(model.parameters(), PEAK_LR, momentum=0.9)


def measure_rank(out: Path) -> None:
    """One host: steps with DDP, with the default of `gg.sparsify`, and with DDP again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    part = BATCH // dist.get_world_size()
    x, y = torch.randn(part, 784), torch.randint(10, (part,))

    def train(model: nn.Module, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        return time.perf_counter()

    def measure_ddp() -> list[float]:
        inner = perceptron()
        model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)
        optimizer = sgd(inner)
        ends = [train(model, optimizer) for _ in range(DDP_STEPS)]
        return [b - a for a, b in pairwise(ends[10:])]

    ddp, model = measure_ddp(), perceptron()
    optimizer, steps, sends_all = sgd(model), list[float](), list[bool]()
    dist.barrier()
    starts = time.perf_counter()
    with gg.sparsify(model, optimizer) as session:
        dist.barrier()
        begun, busy = time.perf_counter(), CpuBusy()
        for step in range(STEPS):
            steps.append(round(train(model, optimizer) - begun, 5))
            if step % LOOKED == LOOKED - 1:
                groups = session.stats().groups
                sends_all.append(all(group.chosen == group.elements for group in groups))
        dist.barrier()
        stats = session.stats()
    shares = busy.shares(0.0)
    ddp += measure_ddp()
    if dist.get_rank() == 0:
        figures = {
            "ddp_step_seconds": round(statistics.fmean(ddp), 5),
            "start_seconds": round(begun - starts, 3),
            "end_seconds": steps,
            "sends_all": sends_all,
            "bytes_sent": stats.bytes_sent,
            "all_reduce_bytes": stats.all_reduce_bytes,
            "compared_seconds": stats.compared_seconds,
            "refused": stats.refused,
            "cpu_busy": round(shares[0], 3),
        }
        write_json(out, figures)
    dist.barrier()
    dist.destroy_process_group()


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """All hosts of a cell."""
    out = folder.resolve() / f"{cell.name}.partial"
    words = [sys.executable, "-m", "benchmarks.sparse_seconds", "rank", "--out", str(out)]
    with Network(hosts=cell.world_size, rate_bits_per_second=cell.rate) as network:
        if code := run_everywhere(network, words, timeout_seconds=600):
            raise SystemExit(f"{cell.name}: exit status {code}")
    figures = json.loads(out.read_text())
    out.unlink()
    return figures


def train_virtual(world_size: int, sends_all: list[bool] | None, seed: int) -> dict[str, Any]:
    """Accuracies of virtual ranks after every `EVALUATED` steps; None: of dense gradients."""
    (x, y), test = whole("fashion-mnist")
    torch.manual_seed(seed)
    model = perceptron()

    def density(step: int) -> float:
        return 1.0 if sends_all is None or sends_all[step // LOOKED] else DEFAULT_DENSITY(step)

    optimizer = sgd(model)
    ranks = SparsifiedRanks(model, optimizer, world_size, density=density)
    accuracy = []
    for epoch in range(STEPS // 234):
        order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(len(y)))
        for chosen in order.split(BATCH)[:234]:
            optimizer.param_groups[0]["lr"] = cosine(PEAK_LR, ranks.steps, STEPS, 234)
            parts = [
                (x[chosen[r::world_size]], y[chosen[r::world_size]]) for r in range(world_size)
            ]
            ranks.step(parts)
            if ranks.steps % EVALUATED == 0:
                accuracy.append(round(evaluate(model, test)["accuracy"] / 100, 4))
    return {"accuracy": accuracy}


def steps_to(accuracy: list[float], target: float) -> int | None:
    """The first evaluation from which on it is reached."""
    reached = next((i for i, value in enumerate(accuracy) if value >= target), None)
    return None if reached is None else EVALUATED * (reached + 1)


def row(cell: Cell, measured: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The figures of a cell."""
    seconds: dict[str, list[float | None]] = {"ddp": [], "sparsify": []}
    ends: dict[str, list[float]] = {"ddp": [], "sparsify": []}
    for seed in range(SEEDS):
        curves = {}
        for name, sends_all in (("ddp", None), ("sparsify", measured["sends_all"])):
            if name == "sparsify" and all(measured["sends_all"]):  # the gradients are those of DDP
                curves[name] = curves["ddp"]
                continue
            ranks = 1 if name == "ddp" else cell.world_size  # the mean over ranks is one gradient
            path = folder / f"{name if name == 'ddp' else cell.name}-{seed}.json"
            setting = {"world_size": ranks, "sends_all": sends_all, "steps": STEPS, "lr": PEAK_LR}
            found = once(path, setting, lambda a=(ranks, sends_all, seed): train_virtual(*a))
            curves[name] = found["accuracy"]
            tell(path.stem, {"accuracy": found["accuracy"][-1]})
        target = curves["ddp"][-1] - LESS
        for name, curve in curves.items():
            ends[name].append(curve[-1])
            steps = steps_to(curve, target)
            each = measured["ddp_step_seconds"]
            took = None
            if steps is not None:
                took = each * steps if name == "ddp" else measured["end_seconds"][steps - 1]
            seconds[name].append(took and round(took, 2))
    shares = [
        None if ours is None or ddp is None else round(ours / ddp, 3)
        for ours, ddp in zip(seconds["sparsify"], seconds["ddp"], strict=True)
    ]
    difference = paired([100 * a for a in ends["sparsify"]], [100 * a for a in ends["ddp"]])
    return {
        "world_size": cell.world_size,
        "rate_bits_per_second": cell.rate,
        "accuracy": ends,
        "difference_in_points": difference,
        "seconds_to_target": seconds,
        "shares_of_ddp_time": shares,
        "whole_run_seconds": {
            "ddp": round(measured["ddp_step_seconds"] * STEPS, 1),
            "sparsify": round(measured["end_seconds"][-1], 1),
        },
        "last_step_seconds": {
            "ddp": measured["ddp_step_seconds"],
            "sparsify": round((measured["end_seconds"][-1] - measured["end_seconds"][-51]) / 50, 5),
        },
        "dense_steps": LOOKED * sum(measured["sends_all"]),
        **{n: measured[n] for n in ("start_seconds", "bytes_sent", "all_reduce_bytes")},
        **{n: measured[n] for n in ("compared_seconds", "cpu_busy", "refused")},
    }


def main() -> None:
    """Measures steps, or trains virtual ranks and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("steps", "accuracy", "rank"))
    parser.add_argument("--folder", type=Path, default=Path("runs/sparse_seconds"))
    parser.add_argument("--cells", nargs="+", help="hosts and Mbit/s of those to measure: 8-1000")
    parser.add_argument("--out", type=Path, help="of a rank")
    options = parser.parse_args()
    if options.what == "rank":
        measure_rank(options.out)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, missing = [], []
    torch.set_num_threads(1)
    for cell in CELLS:
        path = options.folder / f"steps-{cell.name}.json"
        if options.what == "steps":
            if options.cells is None or cell.name in options.cells:
                measured = once(
                    path, cell._asdict(), lambda c=cell: measure_cell(c, options.folder)
                )
                tell(cell.name, {"ddp": measured["ddp_step_seconds"]})
        elif path.exists():
            rows.append(row(cell, json.loads(path.read_text())["figures"], options.folder))
        else:
            missing.append(cell.name)
    if rows:
        rule = f"target: the accuracy of DDP with the same seed, less {100 * LESS:g} points"
        figures = {"rule": rule, "missing": missing, "rows": rows}
        print(write("sparse_seconds", figures))


if __name__ == "__main__":
    main()
