"""Time to all-reduce's accuracy, in real training on a shaped network.

Every worker is a host of its own behind a link of the laboratory, and computes for real; hosts
share this machine's cores, so a step takes longer the more of them there are, and the processors
are busy throughout: every run says how busy, and how much of that other programs took.
The target of a seed is the final accuracy that DistributedDataParallel has with it. Gossip runs as
many epochs, and where it falls short of the target once more with a quarter more of them, and if
need be with twice as many, because a learning rate that falls to zero with the last epoch leaves a
run that is a tenth of a point short nothing to catch up with.

All of it takes about two hours on 2 cores. A seed of every task comes before the next seed, and
DistributedDataParallel against gossip before the longer runs; after every run the results are
written, with what is missing named. Runs that are done are kept between calls, and one that failed
is tried again by the next. Where more runs are published than are done in the folder, what is done
is written there instead, since times of two machines do not stand beside each other.

Needs what `benchmarks.netlab` needs: Linux, root, iproute2.

    python -m benchmarks.time_to_accuracy
    python -m benchmarks.time_to_accuracy --only fashion --world-size 4 --seeds 1  # some 8 minutes
    python -m benchmarks.time_to_accuracy --minutes 30   # begins no run after that
"""

import argparse
import hashlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _common
from benchmarks._alone import BusyError, alone
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError, Network, format_rate
from benchmarks.network._busy import CpuBusy
from benchmarks.network._marks import MOST_BUSY_BY_OTHERS
from gossipgrad.train._summary import write_json

DDP, GOSSIP = "ddp", "gossip"
LONGER = ["gossip, a quarter more epochs", "gossip, twice the epochs"]
CONTESTANTS = {
    DDP: ("allreduce", 1.0),
    GOSSIP: ("gossip", 1.0),
    LONGER[0]: ("gossip", 1.25),
    LONGER[1]: ("gossip", 2.0),
}

SEEDS = 3
BUSY = (
    "the hosts share this machine's processors, which are busy throughout by design: a run is "
    "marked by what other programs took of them, not by how busy they were"
)


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

    def about(self, contestants: Iterable[str]) -> dict:
        """What stands beside the figures of its runs."""
        return {
            "task": self.name,
            "world_size": self.world_size,
            "rate_bits_per_second": self.rate_bits_per_second,
            "commands": {n: "gossipgrad " + " ".join(self.command(n, 0)) for n in contestants},
        }

    def slug(self, contestant: str, seed: int) -> str:
        """The name of a run's folder; other settings of one have another."""
        command = " ".join(self.command(contestant, seed))
        words = (self.name, self.world_size, format_rate(self.rate_bits_per_second))
        text = "-".join(str(word) for word in (*words, *CONTESTANTS[contestant], seed))
        text = text.replace(" ", "").replace(",", "-").replace("/", "").lower()
        return f"{text}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


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


FASHION = ("--data", "fashion-mnist", "--model", "lenet", "--lr", "0.02")
CIFAR = ("--data", "cifar10-small", "--model", "resnet20", "--lr", "0.1", "--warmup-epochs", "1")
TASKS = [
    Task("Fashion-MNIST, LeNet", 4, 5e7, 4, (*FASHION, "--batch-size", "64")),
    Task("CIFAR-10 small, ResNet-20", 4, 2.5e7, 4, (*CIFAR, "--batch-size", "32")),
    Task("Fashion-MNIST, LeNet", 8, 5e7, 4, (*FASHION, "--batch-size", "32")),
    Task("CIFAR-10 small, ResNet-20", 8, 2.5e7, 4, (*CIFAR, "--batch-size", "16")),
]


def order(tasks: list[Task], seeds: int) -> list[Run]:
    """All runs, the most telling first."""
    return [
        Run(task, contestant, seed)
        for seed in range(seeds)
        for contestants in ((DDP, GOSSIP), *((longer,) for longer in LONGER))
        for task in tasks
        for contestant in contestants
    ]


def train(run: Run, out: Path, timeout_seconds: float) -> None:
    """One run on a network made for it.

    Raises:
        FailedRunError: It took too long, a rank failed, or the links did not hold their rates.
        NetlabError: There is no laboratory here.
    """
    task = run.task
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "gossipgrad", *task.command(run.contestant, run.seed)]
    command += ["--quiet", "--out", str(partial)]
    with Network(hosts=task.world_size, rate_bits_per_second=task.rate_bits_per_second) as network:
        try:
            figures = _trained(network, command, timeout_seconds)
        except NetlabError as error:
            raise FailedRunError(str(error)) from error
    (partial / "measured.json").write_text(json.dumps(figures))
    partial.rename(out)


def _trained(network: Network, command: list[str], timeout_seconds: float) -> dict:
    """Runs the command on every host; what its hosts have sent, and how busy the machine was."""
    hosts = range(network.hosts)
    network.verify()
    before = [network.counters(host).sent_bytes for host in hosts]
    own, busy = _own_user_seconds(), CpuBusy()
    processes = []
    for host in hosts:
        environment = {**os.environ, **network.environment(host), "OMP_NUM_THREADS": "1"}
        processes.append(network.popen(host, command, env=environment))
    deadline = time.monotonic() + timeout_seconds
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise FailedRunError(f"took more than {timeout_seconds:g} s") from None
    if any(codes):
        raise FailedRunError(f"its ranks ended with {codes}")
    share, by_others = busy.shares(_own_user_seconds() - own)
    after = [network.counters(host).sent_bytes for host in hosts]
    return {
        "sent_bytes_per_host": [now - then for now, then in zip(after, before, strict=True)],
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


def figures_of(out: Path, seed: int) -> dict:
    """What a run that is kept has come to, and what was measured beside it."""
    points = curve(out)
    measured = json.loads((out / "measured.json").read_text())
    reached = {"accuracy": points[-1][1], "train_seconds": points[-1][0], "curve": points}
    return {"seed": seed, **reached, **measured}


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


def is_needed(run: Run, folder: Path) -> bool:
    """Whether a run tells anything: a longer one if no shorter came to the target that there is."""
    if run.contestant not in LONGER:
        return True
    shorter = [GOSSIP, *LONGER[: LONGER.index(run.contestant)]]
    outs = [folder / run.task.slug(name, run.seed) for name in shorter]
    target = _target(run.task, run.seed, folder)
    return target is not None and not any(
        out.exists() and seconds_to(curve(out), target) is not None for out in outs
    )


def _target(task: Task, seed: int, folder: Path) -> float | None:
    ddp = folder / task.slug(DDP, seed)
    return curve(ddp)[-1][1] if ddp.exists() else None


def row(task: Task, seeds: int, folder: Path) -> dict:
    """What is there of one task, contestant by contestant, seed by seed."""
    found: dict[str, list[dict]] = {}
    for name in CONTESTANTS:
        runs = []
        for seed in range(seeds):
            out = folder / task.slug(name, seed)
            if not out.exists():
                continue
            figures, target = figures_of(out, seed), _target(task, seed, folder)
            reached = None if target is None else seconds_to(figures["curve"], target)
            runs.append({**figures, "target": target, "seconds_to_ddp_accuracy": reached})
        found[name] = runs
    of_seeds = shares([run for name in (GOSSIP, *LONGER) for run in found[name]], found[DDP])
    return {
        **task.about(CONTESTANTS),
        "runs": found,
        "shares_of_ddp_time": of_seeds,
        "ratio_of_times_to_ddp": ratio(list(of_seeds.values())),
    }


def shares(runs: list[dict], ddp: list[dict]) -> dict[str, float | None]:
    """By seed, gossip's time to the target as a share of DDP's; None where it missed it.

    A seed's time is that of its first run to reach the target. Seeds that both have.

    Example:
        >>> ddp = [{"seed": 0, "seconds_to_ddp_accuracy": 40.0}]
        >>> missed = {"seed": 0, "seconds_to_ddp_accuracy": None}
        >>> reached = {"seed": 0, "seconds_to_ddp_accuracy": 30.0}
        >>> shares([missed, reached], ddp)
        {'0': 0.75}
    """
    times = {run["seed"]: run["seconds_to_ddp_accuracy"] for run in ddp}
    found: dict[str, float | None] = {}
    for run in runs:
        seed, own = run["seed"], run["seconds_to_ddp_accuracy"]
        if times.get(seed) and found.get(str(seed)) is None:
            found[str(seed)] = None if own is None else round(own / times[seed], 3)
    return found


def ratio(of_seeds: Sequence[float | None]) -> float | None:
    """Median over seeds; None where there is none, or one missed the target in all its runs."""
    found = [share for share in of_seeds if share is not None]
    return round(statistics.median(found), 3) if found and len(found) == len(of_seeds) else None


def report(seeds: int, folder: Path, failed: dict[str, str]) -> Path:
    """Writes what is there of all tasks, and names what is not.

    Into the results and the page, or, where more is published than is there, into the folder.
    """
    missing = [
        run
        for run in order(TASKS, seeds)
        if not _folder(run, folder).exists() and is_needed(run, folder)
    ]
    figures = {
        "rows": [row(task, seeds, folder) for task in TASKS],
        "processors": BUSY,
        "missing": [run.name for run in missing],
        "failed": failed,
    }
    path = _common.RESULTS / "time_to_accuracy.json"
    lost = _runs(json.loads(path.read_text())["rows"]) if path.exists() else set()
    lost -= _runs(figures["rows"])
    if not lost:
        return _common.write(path.stem, figures)
    print(
        f"{path} stays as it is: {len(lost)} of its runs are not in {folder}; remove it to publish "
        "those that are",
        flush=True,
    )
    path = folder / path.name
    write_json(path, figures)
    return path


def _runs(rows: list[dict]) -> set[tuple]:
    """Which there are."""
    return {
        (row["commands"][name], row["world_size"], row["rate_bits_per_second"], run["seed"])
        for row in rows
        for name, runs in row["runs"].items()
        for run in runs
    }


def _folder(run: Run, folder: Path) -> Path:
    return folder / run.task.slug(run.contestant, run.seed)


def main() -> int:
    """Runs what is missing, and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("runs/time_to_accuracy"))
    parser.add_argument("--only", default="", help="tasks whose name contains this: fashion, cifar")
    parser.add_argument("--world-size", type=int, help="tasks of so many hosts: 4, 8")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--minutes", type=float, help="begin no further runs after so long")
    options = parser.parse_args()
    tasks = [
        task
        for task in TASKS
        if options.only.lower() in task.name.lower()
        and options.world_size in (None, task.world_size)
    ]
    if options.seeds < 1 or not tasks:
        named = [f"{task.name}, {task.world_size} hosts" for task in TASKS]
        parser.error(f"--seeds must be 1 or more; --only and --world-size choose among {named}")
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: leave it out for no limit")
    folder = options.folder.resolve()
    try:
        with alone(folder / "lock"), ends_as_ctrl_c():
            return _train_missing(tasks, options.seeds, folder, options.timeout, options.minutes)
    except BusyError as error:
        print(error, file=sys.stderr)
        return 2


def _train_missing(
    tasks: list[Task], seeds: int, folder: Path, timeout_seconds: float, minutes: float | None
) -> int:
    """Runs what is missing and writes the table after each; the exit status."""
    told = max(seeds, SEEDS)  # of what is done, whatever is to be done now
    failed: dict[str, str] = {}
    begun = time.monotonic()
    for run in order(tasks, seeds):
        out = _folder(run, folder)
        if out.exists() or not is_needed(run, folder):
            continue
        if minutes is not None and time.monotonic() - begun > 60 * minutes:
            print(f"stopped after {minutes:g} minutes: the rest is for next time")
            break
        try:
            train(run, out, timeout_seconds)
        except FailedRunError as error:
            failed[run.name] = str(error)
            print(f"{run.name}: failed: {error}", flush=True)
        except NetlabError as error:
            print(f"no laboratory here: {error}", file=sys.stderr)
            return 2
        else:
            seconds, accuracy = curve(out)[-1]
            print(f"{run.name}: {100 * accuracy:.2f} % after {seconds:.1f} s", flush=True)
        report(told, folder, failed)
    print(report(told, folder, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
