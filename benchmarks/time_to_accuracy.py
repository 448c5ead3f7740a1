"""Time to all-reduce's accuracy of the command's jobs, in real training on a shaped network.

Every worker is a host of its own behind a link of the laboratory, and computes for real; hosts
share this machine's cores, so a step takes longer the more of them there are, and the processors
are busy throughout: every run says how much of that other programs took. The target of a seed is
the final accuracy of DistributedDataParallel with it, or half a point less (`sparse`,
`apoptosis`). A contestant runs as many epochs, and where it falls short of the target once more
with more of them: a learning rate that falls to zero with the last epoch leaves a run that is a
tenth of a point short nothing to catch up with.

The gossip family takes about two hours on 2 cores. Runs that are done are kept. Needs Linux, root
and iproute2, as `benchmarks.network` does.

    python -m benchmarks.time_to_accuracy
    python -m benchmarks.time_to_accuracy --family sparse
    python -m benchmarks.time_to_accuracy --only cifar --world-size 4 --seeds 1  # some 10 minutes
    python -m benchmarks.time_to_accuracy --minutes 30   # begins no run after that
"""

import argparse
import hashlib
import itertools
import json
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import CpuBusy, ends_as_ctrl_c, write
from benchmarks.network import Network, NetworkError, run_everywhere
from benchmarks.network._measure import MOST_BUSY_BY_OTHERS

DDP = "DDP"


class Task(NamedTuple):
    """What is trained, on how many hosts, behind which links."""

    name: str
    world_size: int
    rate_bits_per_second: float
    epochs: int
    options: str  # of `gossipgrad train`
    own: str = ""  # of all but DDP


class Family(NamedTuple):
    """Contestants that are held against DDP."""

    results: str
    contestants: dict[str, tuple[str, float]]  # the strategy, and how many times the epochs
    less: float  # by how much the target is below the accuracy of DDP
    tasks: tuple[Task, ...]


class Run(NamedTuple):
    """One of the runs."""

    family: Family
    task: Task
    contestant: str
    seed: int

    @property
    def command(self) -> str:
        """The words after `gossipgrad`."""
        task = self.task
        strategy, factor = self.family.contestants.get(self.contestant, ("allreduce", 1.0))
        own = "" if self.contestant == DDP else f" {task.own}"
        epochs = round(task.epochs * factor)
        words = f"train {task.options} --epochs {epochs} --strategy {strategy}{own}"
        return f"{' '.join(words.split())} --seed {self.seed} --trace 0"

    def __str__(self) -> str:
        return (
            f"{self.task.name}, {self.task.world_size} hosts, {self.contestant}, seed {self.seed}"
        )

    def folder(self, base: Path) -> Path:
        """Where it is kept; other settings have another."""
        text = str(self).replace(" ", "").replace(",", "-").lower()
        digest = f"{self.command} {self.task.rate_bits_per_second}".encode()
        return base / f"{text}-{hashlib.sha256(digest).hexdigest()[:8]}"

    def target(self, base: Path) -> float | None:
        """The accuracy to come to; None before DDP's run."""
        ddp = self._replace(contestant=DDP).folder(base)
        return curve(ddp)[-1][1] - self.family.less if ddp.exists() else None

    def is_needed(self, base: Path) -> bool:
        """Whether it is of use: a longer one where those before fell short of the target."""
        names = list(self.family.contestants)
        if self.contestant == DDP or self.family.contestants[self.contestant][1] == 1.0:
            return True
        target = self.target(base)
        outs = [
            self._replace(contestant=name).folder(base)
            for name in names[: names.index(self.contestant)]
        ]
        return target is not None and all(
            out.exists() and seconds_to(curve(out), target) is None for out in outs
        )


FASHION = "--data fashion-mnist --model lenet --lr 0.02 --batch-size"
CIFAR = "--job benchmarks._tasks:cifar_resnet --lr 0.1 --warmup-epochs 1 --batch-size"
WIDE = "--job benchmarks._tasks:fashion_wide --lr 0.1 --batch-size 128"
LENET, RESNET = "Fashion-MNIST, LeNet", "CIFAR-10 small, ResNet-20"
SPARSE = "--density 0.01 --density-warmup-steps"  # a quarter of an epoch a stage
FAMILIES = {
    "gossip": Family(
        "time_to_accuracy",
        {
            "gossip": ("gossip", 1.0),
            "gossip, a quarter more epochs": ("gossip", 1.25),
            "gossip, twice the epochs": ("gossip", 2.0),
        },
        0.0,
        (
            Task(RESNET, 4, 2.5e7, 4, f"{CIFAR} 32"),
            Task(RESNET, 8, 2.5e7, 4, f"{CIFAR} 16"),
        ),
    ),
    "sparse": Family(
        "sparse_time_to_accuracy",
        {
            "omgs": ("sparse", 1.0),
            "omgs, a quarter more epochs": ("sparse", 1.25),
            "omgs, half more epochs": ("sparse", 1.5),
        },
        0.005,
        tuple(
            task
            for rate in (1e8, 1e9)
            for task in (
                Task(LENET, 4, rate, 4, f"{FASHION} 64", f"{SPARSE} 59"),
                Task(RESNET, 4, rate, 4, f"{CIFAR} 32", f"{SPARSE} 20 --momentum-correction"),
            )
        ),
    ),
    "apoptosis": Family(
        "apoptosis_time_to_accuracy",
        {"gossip and apoptosis": ("gossip --apoptosis 0.0045", 1.0), "gossip": ("gossip", 1.0)},
        0.005,
        tuple(Task("Fashion-MNIST, MLP 784-1024-1024-10", p, 1e8, 3, WIDE) for p in (4, 8)),
    ),
}


class FailedRunError(RuntimeError):
    """Training failed or took too long."""


def run_on_network(
    hosts: int, bits_per_second: float, words: list[str], timeout_seconds: float
) -> dict[str, Any]:
    """Runs a command on every host of a network made for it; bytes and processor time.

    Raises:
        FailedRunError: A rank failed, or it took too long.
    """
    with Network(hosts=hosts, rate_bits_per_second=bits_per_second) as network:
        before, busy = resource.getrusage(resource.RUSAGE_CHILDREN), CpuBusy()
        if code := run_everywhere(network, words, timeout_seconds=timeout_seconds):
            raise FailedRunError(f"a rank failed or it took too long: exit status {code}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        share, by_others = busy.shares(after.ru_utime - before.ru_utime)
        own = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return {
            "sent_bytes": network.passed_bytes(network.hosts),
            "cpu_seconds": round(own, 1),
            "cpu_busy": round(share, 3),
            "cpu_busy_by_others": round(by_others, 3),
            "marked": by_others > MOST_BUSY_BY_OTHERS,
        }


def train(run: Run, out: Path, timeout_seconds: float) -> None:
    """One run on a network made for it."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    words = [sys.executable, "-m", "gossipgrad", *run.command.split(), "--quiet"]
    words += ["--out", str(partial)]
    task = run.task
    figures = run_on_network(task.world_size, task.rate_bits_per_second, words, timeout_seconds)
    (partial / "measured.json").write_text(json.dumps(figures))
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


def row(family: Family, task: Task, seeds: int, base: Path) -> dict[str, Any]:
    """What is there of one task.

    The share of a seed is the time of the first run that reached the target, of DDP's.
    """
    found: dict[str, list[dict]] = {name: [] for name in (DDP, *family.contestants)}
    shares: dict[str, float | None] = {}
    for name, seed in itertools.product(found, range(seeds)):
        run = Run(family, task, name, seed)
        out, target = run.folder(base), run.target(base)
        if not out.exists() or target is None:
            continue
        points = curve(out)
        figures = {"seed": seed, "accuracy": points[-1][1], "train_seconds": points[-1][0]}
        figures["seconds_to_target"] = own = seconds_to(points, target)
        found[name].append(figures | json.loads((out / "measured.json").read_text()))
        ddp = next(one["seconds_to_target"] for one in found[DDP] if one["seed"] == seed)
        is_first = (
            name == next(iter(family.contestants)) or family.contestants.get(name, ("", 1))[1] > 1
        )
        if is_first and shares.get(str(seed)) is None:
            shares[str(seed)] = None if own is None else round(own / ddp, 3)
    reached = [share for share in shares.values() if share is not None]
    return {
        "task": task.name,
        "world_size": task.world_size,
        "rate_bits_per_second": task.rate_bits_per_second,
        "commands": {name: f"gossipgrad {Run(family, task, name, 0).command}" for name in found},
        "runs": found,
        "shares_of_ddp_time": shares,
        "median_share": round(statistics.median(reached), 3) if reached else None,
    }


def main() -> int:
    """Runs what is missing, and writes the results: into the folder while something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="gossip")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of DDP, for a try")
    parser.add_argument("--folder", type=Path, help="runs/RESULTS unless given")
    parser.add_argument("--only", default="", help="tasks whose name contains this: fashion, cifar")
    parser.add_argument("--world-size", type=int, help="tasks of so many hosts: 4, 8")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    if options.epochs:
        family = family._replace(
            tasks=tuple(t._replace(epochs=options.epochs) for t in family.tasks)
        )
    tasks = [t for t in family.tasks if options.only.lower() in t.name.lower()]
    tasks = [t for t in tasks if options.world_size in (None, t.world_size)]
    base = (options.folder or Path("runs") / family.results).resolve()
    # A seed of every task before the next seed, longer runs after those that need them.
    names = (DDP, *family.contestants)
    runs = [Run(family, t, n, s) for s in range(options.seeds) for n in names for t in tasks]
    begun, failed = time.monotonic(), dict[str, str]()
    try:
        with ends_as_ctrl_c():
            for run in runs:
                out = run.folder(base)
                if out.exists() or not run.is_needed(base):
                    continue
                if time.monotonic() - begun > 60 * options.minutes:
                    print(f"stopped after {options.minutes:g} minutes: the rest is for next time")
                    break
                try:
                    train(run, out, options.timeout)
                    seconds, accuracy = curve(out)[-1]
                    print(f"{run}: {100 * accuracy:.2f} % after {seconds:.1f} s", flush=True)
                except FailedRunError as error:
                    failed[str(run)] = str(error)
                    print(f"{run}: failed: {error}", flush=True)
            every = [Run(family, t, n, s) for t in family.tasks for n in names for s in range(3)]
            missing = [str(r) for r in every if r.is_needed(base) and not r.folder(base).exists()]
            rows = [row(family, task, max(3, options.seeds), base) for task in family.tasks]
            path = base / f"{family.results}.json" if missing else None
            figures = {"rows": rows, "missing": missing, "failed": failed}
            print(write(family.results, figures, module="time_to_accuracy", path=path))
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 2
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
