"""Time to DDP's accuracy with sparse gradients, in real training on a shaped network.

As in `time_to_accuracy`: every worker is a host behind a link of its own, computes for real, and
shares this machine's processors with the others. The target of a seed is half a point less than the
final accuracy that DistributedDataParallel has with it. `omgs` runs as many epochs, and where it
falls short of the target once more with a quarter more of them, and then with half more. Runs that
are done are kept.

Needs what `benchmarks.netlab` needs: Linux, root, iproute2.

    python -m benchmarks.sparse_time_to_accuracy
    python -m benchmarks.sparse_time_to_accuracy --only fashion --seeds 1
    python -m benchmarks.sparse_time_to_accuracy --report   # publishes what is done; the rest stays
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._alone import BusyError, alone
from benchmarks._common import RESULTS, write
from benchmarks._ends import ends_as_ctrl_c
from benchmarks._pages import DOCS, fill_between, table
from benchmarks.netlab import NetlabError
from benchmarks.time_to_accuracy import (
    BUSY,
    CIFAR,
    FASHION,
    FailedRunError,
    Run,
    Task,
    curve,
    figures_of,
    seconds_to,
    train,
)

_NAME = "sparse_time_to_accuracy"
DDP, OMGS = "DDP", "omgs"
LONGER = {"omgs, a quarter more epochs": 1.25, "omgs, half more epochs": 1.5}
CONTESTANTS = {DDP: 1.0, OMGS: 1.0, **LONGER}
_HOSTS = 4
_LESS = 0.005  # than the final accuracy of DDP: what counts as parity
_HEAD = ("real training", "links", *CONTESTANTS, "time to half a point below DDP")


@dataclass(frozen=True)
class SparseTask(Task):
    """What is trained, at which density, behind which links.

    Attributes:
        sparse: Options of `omgs` alone.
    """

    sparse: tuple[str, ...] = ()

    def command(self, contestant: str, seed: int) -> list[str]:
        """The words after `gossipgrad`."""
        strategy = ("allreduce",) if contestant == DDP else ("omgs", *self.sparse)
        epochs = round(self.epochs * CONTESTANTS[contestant])
        words = ["train", *self.options, "--epochs", str(epochs), "--strategy", *strategy]
        return [*words, "--seed", str(seed), "--trace", "0"]

    def folder(self, contestant: str, seed: int, base: Path) -> Path:
        """Where a run is kept."""
        data = self.name.partition(",")[0].lower().replace(" ", "-")
        rate = f"{self.rate_bits_per_second / 1e6:g}mbit"
        called = contestant.lower().replace(", ", "-").replace(" ", "-")
        return base / f"{data}-{rate}-{called}-{seed}"


def _tasks() -> list[SparseTask]:
    tasks = []
    for rate in (1e8, 1e9):
        for name, options, batch, stage_steps, more in (
            ("Fashion-MNIST, LeNet", FASHION, "64", 59, ()),  # a quarter of an epoch a stage
            ("CIFAR-10 small, ResNet-20", CIFAR, "32", 20, ("--momentum-correction",)),
        ):
            sparse = ("--density", "0.01", "--density-warmup-steps", str(stage_steps), *more)
            of = (*options, "--batch-size", batch)
            tasks.append(SparseTask(name, _HOSTS, rate, 4, of, sparse))
    return tasks


TASKS = _tasks()


def order(tasks: list[SparseTask], seeds: int) -> list[Run]:
    """All runs, a seed of every task before the next seed."""
    return [
        Run(task, contestant, seed)
        for seed in range(seeds)
        for task in tasks
        for contestant in CONTESTANTS
    ]


def is_needed(run: Run, base: Path) -> bool:
    """Whether a run tells anything: a longer one where those before fell short of the target."""
    if run.contestant not in LONGER:
        return True
    assert isinstance(run.task, SparseTask)
    names = list(CONTESTANTS)
    before = names[: names.index(run.contestant)]
    ddp, *shorter = (run.task.folder(name, run.seed, base) for name in before)
    return all(out.exists() for out in (ddp, *shorter)) and all(
        seconds_to(curve(out), _target(ddp)) is None for out in shorter
    )


def _target(ddp: Path) -> float:
    return curve(ddp)[-1][1] - _LESS


def row(task: SparseTask, base: Path, seeds: int) -> dict[str, Any]:
    """What is there of a task, by contestant and seed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for seed in range(seeds):
        ddp = task.folder(DDP, seed, base)
        target = _target(ddp) if ddp.exists() else None
        for name, runs in found.items():
            out = task.folder(name, seed, base)
            if out.exists():
                figures = figures_of(out, seed)
                reached = None if target is None else seconds_to(figures["curve"], target)
                runs.append({**figures, "seconds_to_target": reached})
    return {**task.about(CONTESTANTS), "runs": found, "shares_of_ddp_time": shares(found)}


def shares(found: dict[str, list[dict[str, Any]]]) -> dict[str, float | None]:
    """By seed, the time of the first `omgs` run to reach the target as a share of DDP's.

    None where none reached it.
    """
    times = {run["seed"]: run["seconds_to_target"] for run in found[DDP]}
    told: dict[str, float | None] = {}
    for run in (run for name, runs in found.items() if name != DDP for run in runs):
        seed, own = run["seed"], run["seconds_to_target"]
        if seed in times and told.get(str(seed)) is None:
            told[str(seed)] = None if own is None else round(own / times[seed], 3)
    return told


def page_table(rows: list[dict[str, Any]]) -> str:
    """A row a task: accuracy and seconds by contestant, and the time to the target."""
    lines = []
    for each in rows:
        if not any(each["runs"].values()):
            continue
        links = f"{each['world_size']} at {each['rate_bits_per_second'] / 1e6:g} Mbit/s"
        ended = [_ended(each["runs"].get(name, [])) for name in CONTESTANTS]
        lines.append([each["task"], links, *ended, _share(each["shares_of_ddp_time"])])
    return table(_HEAD, lines)


def _ended(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    accuracy = statistics.fmean(100 * run["accuracy"] for run in runs)
    seconds = statistics.median(run["train_seconds"] for run in runs)
    mark = "*" if any(run["marked"] for run in runs) else ""
    seeds = f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
    return f"{accuracy:.1f} %, {seconds:.0f} s{mark}{seeds}"


def _share(by_seed: dict[str, float | None]) -> str:
    found = [share for share in by_seed.values() if share is not None]
    if not found:
        return "not reached" if by_seed else "not run"
    told = f"{statistics.median(found):.2f} of DDP's"
    if len(found) > 1:
        told += f" ({min(found):.2f} to {max(found):.2f})"
    missed = len(by_seed) - len(found)
    return told + (f", not reached by {missed}" if missed else "")


def with_published(rows: list[dict[str, Any]], published: list[dict[str, Any]]) -> list[dict]:
    """Rows, and those that were published of tasks of which nothing is there."""
    held = {(each["task"], each["rate_bits_per_second"]): each for each in published}
    return [
        each
        if any(each["runs"].values())
        else held.get((each["task"], each["rate_bits_per_second"]), each)
        for each in rows
    ]


def report(base: Path, seeds: int, failed: dict[str, str]) -> Path:
    """Writes what is done into the results and the page; other tasks stay as published."""
    path = RESULTS / f"{_NAME}.json"
    published = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = with_published([row(task, base, seeds) for task in TASKS], published)
    fill_between(DOCS / "sparsify.md", _NAME, page_table(rows))
    return write(_NAME, {"rows": rows, "processors": BUSY, "failed": failed})


def main() -> int:
    """Runs what is missing, and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose name contains this: fashion, cifar")
    parser.add_argument("--folder", type=Path, default=Path(f"runs/{_NAME}"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--report", action="store_true", help="publish what is done, run nothing")
    options = parser.parse_args()
    tasks = [task for task in TASKS if options.only.lower() in task.name.lower()]
    if options.seeds < 1 or not tasks:
        parser.error("--seeds must be 1 or more, and --only part of fashion-mnist or cifar-10")
    failed: dict[str, str] = {}
    try:
        with alone(options.folder / "lock"), ends_as_ctrl_c():
            for run in [] if options.report else order(tasks, options.seeds):
                _once(run, options, failed)
            print(report(options.folder, options.seeds, failed))
    except (BusyError, NetlabError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if failed else 0


def _once(run: Run, options: argparse.Namespace, failed: dict[str, str]) -> None:
    assert isinstance(run.task, SparseTask)
    out = run.task.folder(run.contestant, run.seed, options.folder.resolve())
    if out.exists() or not is_needed(run, options.folder.resolve()):
        return
    try:
        train(run, out, options.timeout)
    except FailedRunError as error:
        failed[run.name] = str(error)
        print(f"{run.name}: failed: {error}", flush=True)
        return
    seconds, accuracy = curve(out)[-1]
    print(f"{run.name}: {100 * accuracy:.2f} % after {seconds:.1f} s", flush=True)
    report(options.folder, options.seeds, failed)


if __name__ == "__main__":
    sys.exit(main())
