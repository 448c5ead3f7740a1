"""Time to all-reduce's accuracy, in real training on a shaped network.

Every worker is a host of its own behind a link of the laboratory, and computes for real; hosts
share this machine's cores, so a step takes longer the more of them there are, and the processors
are busy throughout: every run says how much of that other programs took.
The target of a seed is the final accuracy that DistributedDataParallel has with it, or half a point
less (`sparse`, `apoptosis`). A contestant runs as many epochs, and where it falls short of the
target once more with more of them: a learning rate that falls to zero with the last epoch leaves a
run that is a tenth of a point short nothing to catch up with.

The gossip family takes about two hours on 2 cores. Runs that are done are kept, and one that failed
is tried again by the next call. Results are written when nothing is missing; before, what is done
is written into the folder.

Needs what `benchmarks.network` needs: Linux, root, iproute2.

    python -m benchmarks.time_to_accuracy
    python -m benchmarks.time_to_accuracy --family sparse
    python -m benchmarks.time_to_accuracy --only fashion --world-size 4 --seeds 1  # some 8 minutes
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import BusyError, CpuBusy, alone, ends_as_ctrl_c, write
from benchmarks.network import Network, NetworkError
from benchmarks.network._cells import MOST_BUSY_BY_OTHERS
from benchmarks.network.hosts import run_everywhere

SEEDS = 3
BUSY = (
    "the hosts share this machine's processors, which are busy throughout by design: a run is "
    "marked by what other programs took of them, not by how busy they were"
)


@dataclass(frozen=True)
class Task:
    """What is trained, on how many hosts, behind which links.

    Attributes:
        options: Of `gossipgrad train`, for all contestants.
        own: Of all but DDP.
    """

    name: str
    world_size: int
    rate_bits_per_second: float
    epochs: int
    options: tuple[str, ...]
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Contestants that are held against DDP.

    Attributes:
        results: Their name in the results.
        ddp: What DDP is called there.
        contestants: By name, the strategy with its options, and how many times the epochs.
        longer: Those that run only where the ones before them fell short of the target.
        less: By how much the target is below the accuracy of DDP.
    """

    results: str
    ddp: str
    contestants: dict[str, tuple[tuple[str, ...], float]]
    longer: tuple[str, ...]
    less: float
    tasks: tuple[Task, ...]

    def command(self, run: "Run") -> list[str]:
        """The words after `gossipgrad`."""
        task, is_ddp = run.task, run.contestant == self.ddp
        strategy, factor = (("allreduce",), 1.0) if is_ddp else self.contestants[run.contestant]
        words = ["train", *task.options, "--epochs", str(round(task.epochs * factor))]
        words += ["--strategy", *strategy, *(() if is_ddp else task.own)]
        return [*words, "--seed", str(run.seed), "--trace", "0"]

    def folder(self, run: "Run", base: Path) -> Path:
        """Where a run is kept; other settings have another."""
        task, command = run.task, " ".join(self.command(run))
        rate = f"{task.rate_bits_per_second / 1e6:g}mbit"
        text = f"{task.name}-{task.world_size}-{rate}-{run.contestant}-{run.seed}"
        text = text.replace(" ", "").replace(",", "-").lower()
        return base / f"{text}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Run:
    """One of the runs."""

    task: Task
    contestant: str
    seed: int

    @property
    def name(self) -> str:
        task = self.task
        return f"{task.name}, {task.world_size} hosts, {self.contestant}, seed {self.seed}"


class FailedRunError(RuntimeError):
    """Training failed or took too long."""


FASHION = ("--data", "fashion-mnist", "--model", "lenet", "--lr", "0.02", "--batch-size")
CIFAR = (
    *("--data", "cifar10-small", "--model", "resnet20", "--lr", "0.1", "--warmup-epochs", "1"),
    "--batch-size",
)
WIDE = ("--data", "fashion-mnist", "--model", "mlp-wide", "--lr", "0.1", "--batch-size", "128")
LENET, RESNET = "Fashion-MNIST, LeNet", "CIFAR-10 small, ResNet-20"


def _sparse(stage_steps: int, *more: str) -> tuple[str, ...]:
    return ("--density", "0.01", "--density-warmup-steps", str(stage_steps), *more)


FAMILIES = {
    "gossip": Family(
        results="time_to_accuracy",
        ddp="ddp",
        contestants={
            "gossip": (("gossip",), 1.0),
            "gossip, a quarter more epochs": (("gossip",), 1.25),
            "gossip, twice the epochs": (("gossip",), 2.0),
        },
        longer=("gossip, a quarter more epochs", "gossip, twice the epochs"),
        less=0.0,
        tasks=(
            Task(LENET, 4, 5e7, 4, (*FASHION, "64")),
            Task(RESNET, 4, 2.5e7, 4, (*CIFAR, "32")),
            Task(LENET, 8, 5e7, 4, (*FASHION, "32")),
            Task(RESNET, 8, 2.5e7, 4, (*CIFAR, "16")),
        ),
    ),
    "sparse": Family(
        results="sparse_time_to_accuracy",
        ddp="DDP",
        contestants={
            "omgs": (("omgs",), 1.0),
            "omgs, a quarter more epochs": (("omgs",), 1.25),
            "omgs, half more epochs": (("omgs",), 1.5),
        },
        longer=("omgs, a quarter more epochs", "omgs, half more epochs"),
        less=0.005,
        tasks=tuple(
            task
            for rate in (1e8, 1e9)
            for task in (  # a quarter of an epoch a stage
                Task(LENET, 4, rate, 4, (*FASHION, "64"), _sparse(59)),
                Task(RESNET, 4, rate, 4, (*CIFAR, "32"), _sparse(20, "--momentum-correction")),
            )
        ),
    ),
    "apoptosis": Family(
        results="apoptosis_time_to_accuracy",
        ddp="DDP",
        contestants={
            "gossip and apoptosis": (("gossip", "--apoptosis", "0.0045"), 1.0),
            "gossip": (("gossip",), 1.0),
        },
        longer=(),
        less=0.005,
        tasks=tuple(Task("Fashion-MNIST, MLP 784-1024-1024-10", p, 1e8, 3, WIDE) for p in (4, 8)),
    ),
}


def order(family: Family, tasks: Sequence[Task], seeds: int) -> list[Run]:
    """All runs: a seed of every task before the next seed, longer runs last."""
    first = [name for name in family.contestants if name not in family.longer]
    return [
        Run(task, contestant, seed)
        for seed in range(seeds)
        for contestants in ([family.ddp, *first], *([longer] for longer in family.longer))
        for task in tasks
        for contestant in contestants
    ]


def train(command: list[str], task: Task, out: Path, timeout_seconds: float) -> None:
    """One run on a network made for it.

    Raises:
        FailedRunError: It took too long, or a rank failed.
        NetworkError: There is no laboratory here.
    """
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    words = [sys.executable, "-m", "gossipgrad", *command, "--quiet", "--out", str(partial)]
    with Network(hosts=task.world_size, rate_bits_per_second=task.rate_bits_per_second) as network:
        figures = _trained(network, words, timeout_seconds)
    (partial / "measured.json").write_text(json.dumps(figures))
    partial.rename(out)


def _trained(network: Network, command: list[str], timeout_seconds: float) -> dict:
    """Runs the command on every host; what its hosts have sent, and how busy the machine was."""
    own, busy = _own_user_seconds(), CpuBusy()
    if code := run_everywhere(network, command, timeout_seconds=timeout_seconds):
        raise FailedRunError(f"a rank failed or it took too long: exit status {code}")
    share, by_others = busy.shares(_own_user_seconds() - own)
    return {
        "sent_bytes": network.passed_bytes(network.hosts),
        "cpu_busy": round(share, 3),
        "cpu_busy_by_others": round(by_others, 3),
        "marked": by_others > MOST_BUSY_BY_OTHERS,
    }


def _own_user_seconds() -> float:
    """Of the workers that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


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


def _target(family: Family, task: Task, seed: int, base: Path) -> float | None:
    ddp = family.folder(Run(task, family.ddp, seed), base)
    return curve(ddp)[-1][1] - family.less if ddp.exists() else None


def is_needed(family: Family, run: Run, base: Path) -> bool:
    """Whether a run tells anything: a longer one where those before fell short of the target."""
    if run.contestant not in family.longer:
        return True
    names = list(family.contestants)
    before = [Run(run.task, name, run.seed) for name in names[: names.index(run.contestant)]]
    outs = [family.folder(one, base) for one in before]
    target = _target(family, run.task, run.seed, base)
    return target is not None and all(
        out.exists() and seconds_to(curve(out), target) is None for out in outs
    )


def row(family: Family, task: Task, seeds: int, base: Path) -> dict[str, Any]:
    """What is there of one task, contestant by contestant, seed by seed.

    The share of a seed is the time of the first run that reached the target, of DDP's; None if none
    did.
    """
    found: dict[str, list[dict]] = {}
    shares: dict[str, float | None] = {}
    for name in (family.ddp, *family.contestants):
        found[name] = []
        for seed in range(seeds):
            out = family.folder(Run(task, name, seed), base)
            if not out.exists():
                continue
            points, target = curve(out), _target(family, task, seed, base)
            found[name].append(
                {
                    "seed": seed,
                    "accuracy": points[-1][1],
                    "train_seconds": points[-1][0],
                    "seconds_to_target": None if target is None else seconds_to(points, target),
                    **json.loads((out / "measured.json").read_text()),
                }
            )
    times = {run["seed"]: run["seconds_to_target"] for run in found[family.ddp]}
    first = next(iter(family.contestants))
    for run in (run for name in (first, *family.longer) for run in found[name]):
        seed, own = run["seed"], run["seconds_to_target"]
        if times.get(seed) and shares.get(str(seed)) is None:
            shares[str(seed)] = None if own is None else round(own / times[seed], 3)
    reached = [share for share in shares.values() if share is not None]
    commands = {name: family.command(Run(task, name, 0)) for name in found}
    return {
        "task": task.name,
        "world_size": task.world_size,
        "rate_bits_per_second": task.rate_bits_per_second,
        "commands": {name: f"gossipgrad {' '.join(words)}" for name, words in commands.items()},
        "runs": found,
        "shares_of_ddp_time": shares,
        "median_share": round(statistics.median(reached), 3) if reached else None,
    }


def main() -> int:
    """Runs what is missing, and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="gossip")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, help="runs/RESULTS unless given")
    parser.add_argument("--only", default="", help="tasks whose name contains this: fashion, cifar")
    parser.add_argument("--world-size", type=int, help="tasks of so many hosts: 4, 8")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    tasks = [
        task
        for task in family.tasks
        if options.only.lower() in task.name.lower()
        and options.world_size in (None, task.world_size)
    ]
    if options.seeds < 1 or not tasks:
        named = [f"{task.name}, {task.world_size} hosts" for task in family.tasks]
        parser.error(f"--seeds must be 1 or more; --only and --world-size choose among {named}")
    base = (options.folder or Path("runs") / family.results).resolve()
    seeds = max(options.seeds, SEEDS)
    begun, failed = time.monotonic(), dict[str, str]()
    try:
        with alone(base / "lock"), ends_as_ctrl_c():
            for run in order(family, tasks, options.seeds):
                out = family.folder(run, base)
                if out.exists() or not is_needed(family, run, base):
                    continue
                if time.monotonic() - begun > 60 * options.minutes:
                    print(f"stopped after {options.minutes:g} minutes: the rest is for next time")
                    break
                try:
                    train(family.command(run), run.task, out, options.timeout)
                except FailedRunError as error:
                    failed[run.name] = str(error)
                    print(f"{run.name}: failed: {error}", flush=True)
                else:
                    seconds, accuracy = curve(out)[-1]
                    print(f"{run.name}: {100 * accuracy:.2f} % after {seconds:.1f} s", flush=True)
                _report(family, seeds, base, failed)
            print(_report(family, seeds, base, failed))
    except (BusyError, NetworkError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if failed else 0


def _report(family: Family, seeds: int, base: Path, failed: dict[str, str]) -> Path:
    missing = [
        run.name
        for run in order(family, family.tasks, seeds)
        if is_needed(family, run, base) and not family.folder(run, base).exists()
    ]
    figures = {
        "rows": [row(family, task, seeds, base) for task in family.tasks],
        "processors": BUSY,
        "missing": missing,
        "failed": failed,
    }
    path = base / f"{family.results}.json" if missing else None
    return write(family.results, figures, module="time_to_accuracy", path=path)


if __name__ == "__main__":
    sys.exit(main())
