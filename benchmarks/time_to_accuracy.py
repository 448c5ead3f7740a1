"""Time to all-reduce's accuracy, in real training on a shaped network.

Every worker is a host of its own behind a link of the laboratory, and computes for real; hosts
share this machine's cores, so a step takes longer the more of them there are.
DistributedDataParallel goes first; the target is its final accuracy of the same seed. Gossip runs
as many epochs, and a quarter more, because a learning rate that falls to zero with the last epoch
leaves a run that is a tenth of a point short nothing to catch up with. Runs that are done are kept
between calls.

Needs what `benchmarks.netlab` needs: Linux, root, iproute2.

    python -m benchmarks.time_to_accuracy
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import write
from benchmarks.netlab import Network, format_rate

MORE = 1.25
CONTESTANTS = {
    "ddp": ("allreduce", 1.0),
    "gossip": ("gossip", 1.0),
    "gossip, a quarter more epochs": ("gossip", MORE),
}


@dataclass(frozen=True)
class Task:
    """What is trained, on how many hosts, behind which links."""

    name: str
    world_size: int
    rate_bits_per_second: float
    epochs: int
    options: tuple[str, ...]

    def command(self, contestant: str, seed: int) -> list[str]:
        """The words after `gossipgrad`."""
        strategy, factor = CONTESTANTS[contestant]
        epochs = round(self.epochs * factor)
        words = ["train", *self.options, "--epochs", str(epochs), "--strategy", strategy]
        return [*words, "--seed", str(seed), "--trace", "0"]

    def slug(self, contestant: str, seed: int) -> str:
        """The name of a run's folder."""
        words = (self.name, self.world_size, format_rate(self.rate_bits_per_second))
        text = "-".join(str(word) for word in (*words, *CONTESTANTS[contestant], seed))
        return text.replace(" ", "").replace(",", "-").lower()


FASHION = ("--data", "fashion-mnist", "--model", "lenet", "--lr", "0.02")
CIFAR = ("--data", "cifar10-small", "--model", "resnet20", "--lr", "0.1", "--warmup-epochs", "1")
TASKS = [
    Task("Fashion-MNIST, LeNet", 4, 5e7, 4, (*FASHION, "--batch-size", "64")),
    Task("Fashion-MNIST, LeNet", 8, 5e7, 4, (*FASHION, "--batch-size", "32")),
    Task("CIFAR-10 small, ResNet-20", 4, 2.5e7, 4, (*CIFAR, "--batch-size", "32")),
    Task("CIFAR-10 small, ResNet-20", 8, 2.5e7, 4, (*CIFAR, "--batch-size", "16")),
]


def train(task: Task, contestant: str, seed: int, out: Path, timeout_seconds: float) -> None:
    """One run on a network made for it; a run that fails ends the benchmark."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "gossipgrad", *task.command(contestant, seed)]
    command += ["--quiet", "--out", str(partial)]
    with Network(hosts=task.world_size, rate_bits_per_second=task.rate_bits_per_second) as network:
        network.verify()
        before = [network.counters(host).sent_bytes for host in range(task.world_size)]
        processes = []
        for host in range(task.world_size):
            environment = {**os.environ, **network.environment(host), "OMP_NUM_THREADS": "1"}
            processes.append(network.popen(host, command, env=environment))
        try:
            codes = [process.wait(timeout_seconds) for process in processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{out.name} took more than {timeout_seconds:g} s") from None
        if any(codes):
            raise SystemExit(f"{out.name} failed: its ranks ended with {codes}")
        after = [network.counters(host).sent_bytes for host in range(task.world_size)]
    sent = [now - then for now, then in zip(after, before, strict=True)]
    (partial / "wire.json").write_text(json.dumps({"sent_bytes_per_host": sent}))
    partial.rename(out)


def curve(out: Path) -> list[tuple[float, float]]:
    """Seconds in training steps, evaluations left out, and accuracy at the end of each epoch."""
    points = []
    last: dict = {}
    for line in (out / "metrics-rank0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            last = event
        elif event["event"] == "epoch":
            since = (event["step"] - last["step"]) * last["step_seconds"]
            points.append((last["train_seconds"] + since, event["accuracy"]))
    return points


def seconds_to(points: list[tuple[float, float]], target: float) -> float | None:
    """When the curve first reaches `target`, on straight lines between epochs; None if never.

    Example:
        >>> seconds_to([(10.0, 0.5), (20.0, 0.7)], 0.6)
        15.0
    """
    for (begun, low), (ended, high) in itertools.pairwise([(0.0, 0.0), *points]):
        if high >= target:
            share = (target - low) / (high - low) if high > low else 1.0
            return begun + share * (ended - begun)
    return None


def measure(task: Task, seeds: int, folder: Path, timeout_seconds: float) -> dict:
    """One row: all contestants on one task, seed by seed."""
    found: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    for seed in range(seeds):
        target = 0.0
        for name in CONTESTANTS:
            out = folder / task.slug(name, seed)
            if not out.exists():
                train(task, name, seed, out, timeout_seconds)
            points = curve(out)
            if name == "ddp":
                target = points[-1][1]
            cell = {
                "seed": seed,
                "accuracy": points[-1][1],
                "train_seconds": points[-1][0],
                "seconds_to_ddp_accuracy": seconds_to(points, target),
                "curve": points,
                **json.loads((out / "wire.json").read_text()),
            }
            found[name].append(cell)
            print(task.name, task.world_size, name, {**cell, "curve": None}, flush=True)
    return {
        "task": task.name,
        "world_size": task.world_size,
        "rate_bits_per_second": task.rate_bits_per_second,
        "commands": {name: "gossipgrad " + " ".join(task.command(name, 0)) for name in CONTESTANTS},
        "runs": found,
        "ratio_of_times_to_ddp": {name: ratio(found[name], found["ddp"]) for name in CONTESTANTS},
    }


def ratio(runs: list[dict], ddp: list[dict]) -> float | None:
    """Median over seeds of the time to the target against DDP's; None where a seed missed it."""
    times = [run["seconds_to_ddp_accuracy"] for run in runs]
    if any(time is None for time in times):
        return None
    pairs = zip(times, ddp, strict=True)
    return round(statistics.median(a / b["seconds_to_ddp_accuracy"] for a, b in pairs), 3)


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/time_to_accuracy"))
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    options = parser.parse_args()
    tasks = [task for task in TASKS if options.only.lower() in task.name.lower()]
    if options.seeds < 1 or not tasks:
        parser.error(f"--seeds must be 1 or more, --only part of {[t.name for t in TASKS]}")
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    rows = [measure(task, options.seeds, folder, options.timeout) for task in tasks]
    print(write("time_to_accuracy", {"rows": rows}))


if __name__ == "__main__":
    main()
