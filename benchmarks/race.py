"""Time to all-reduce's accuracy beside peers, in real training on a shaped network.

Every worker is a host of its own behind a link of the laboratory, and computes for real; hosts
share this machine's cores. All contestants run the same plain loop (`_racer.py`) over the same
samples. Each has the best learning rate of its own small search, on a seed that is not among the
reported ones, with 4 hosts. The target of a seed is the final score of DistributedDataParallel with
it: accuracy, or the loss of a text. A contestant runs as many epochs, and where it falls short of
the target once more with more of them: a rate that falls to zero with the last epoch leaves a run
that is a tenth of a point short nothing to catch up with. Seeds with which DDP itself ends more
than 5 % from its search are named and not counted: the best rate of one seed may be unstable.

Runs that are done are kept. Needs Linux, root and iproute2, as `benchmarks.network` does.

    python -m benchmarks.race                                     # some six hours on 2 cores
    python -m benchmarks.race --tasks LeNet --hosts 4 --seeds 1   # 15 minutes with the search
    python -m benchmarks.race --minutes 30                        # begins no run after that
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _racer
from benchmarks._common import best_rate, ends_as_ctrl_c, merged, write
from benchmarks.network import NetworkError
from benchmarks.time_to_accuracy import FailedRunError, run_on_network, seconds_to

DDP = "DDP"
SEARCH_SEED, SEARCH_HOSTS, SEARCH_BITS_PER_SECOND = 100, 4, 1e9
FACTORS = (1.0, 1.25, 1.5, 2.0)  # of the epochs
UNSTABLE = 0.05
SEEDS = 3  # at least, of a cell that is published


class Cell(NamedTuple):
    """A task on so many hosts behind such links."""

    task: str
    hosts: int
    bits_per_second: float


CELLS = (
    Cell("LeNet", 4, 5e7),
    Cell("LeNet", 8, 5e7),
    Cell("GPT", 4, 5e7),
    Cell("ResNet-20", 4, 2.5e7),
    Cell("LeNet", 16, 5e7),
    Cell("GPT", 8, 5e7),
    Cell("ResNet-20", 8, 2.5e7),
)


class Race:
    """The runs that are kept in a folder, and those that are made."""

    def __init__(self, folder: Path, minutes: float, timeout_seconds: float) -> None:
        self.folder, self._timeout_seconds = folder, timeout_seconds
        self._ends = time.monotonic() + 60 * minutes

    def run(self, cell: Cell, name: str, rate: float, factor: float, seed: int) -> dict[str, Any]:
        """A run: made, unless it is there.

        Raises:
            TimeoutError: It is not there, and the time is over.
        """
        task = _racer.TASKS[cell.task]
        epochs = round(task.epochs * factor)
        text = f"{cell.task} {cell.hosts} {cell.bits_per_second:g} {name} {rate:g} {epochs} {seed}"
        path = self.folder / f"{text.replace(', ', '-').replace(' ', '_')}.json"
        if path.exists():
            return json.loads(path.read_text())
        if time.monotonic() > self._ends:
            raise TimeoutError
        out = path.with_suffix(".jsonl")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks._racer", "--task", cell.task]
        words += ["--contestant", name, "--epochs", str(epochs), "--rate", f"{rate:g}"]
        words += ["--seed", str(seed), "--out", str(out)]
        figures = run_on_network(cell.hosts, cell.bits_per_second, words, self._timeout_seconds)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        path.write_text(json.dumps({"epochs": lines, **figures}))
        out.unlink()
        last = lines[-1]
        print(f"{text}: {score(cell, last):.4f} after {last['seconds']:.1f} s", flush=True)
        return {"epochs": lines, **figures}

    def rate(self, cell: Cell, name: str) -> float:
        """The best learning rate of a contestant."""

        def loss_of(rate: float) -> float:
            return self._searched(cell, name, rate)["loss"]

        return best_rate(_racer.TASKS[cell.task].rates, loss_of, 2.0)[0]

    def is_unstable(self, cell: Cell, ddp: dict[str, Any]) -> bool:
        """Whether DDP is far from what it reached in the search: no target for the others."""
        reached = score(cell, self._searched(cell, DDP, ddp["rate"]))
        return abs(ddp["score"] - reached) > UNSTABLE * abs(reached)

    def _searched(self, cell: Cell, name: str, rate: float) -> dict[str, float]:
        """What a run of the search ended with."""
        search = Cell(cell.task, SEARCH_HOSTS, SEARCH_BITS_PER_SECOND)
        return self.run(search, name, rate, 1.0, SEARCH_SEED)["epochs"][-1]

    def contestant(
        self, cell: Cell, name: str, rate: float, seed: int, target: float | None
    ) -> dict[str, Any]:
        """A contestant's runs with a seed, until one reaches the target; None: its own end."""
        found = dict[str, Any]()
        for factor in FACTORS if target is not None else (1.0,):
            run = self.run(cell, name, rate, factor, seed)
            points = [(each["seconds"], score(cell, each)) for each in run["epochs"]]
            if not found:
                found = {"seed": seed, "rate": rate, "score": round(points[-1][1], 4)}
                found["train_seconds"] = points[-1][0]
            seconds = seconds_to(points, points[-1][1] if target is None else target)
            if seconds is not None:
                break
        found |= {"epochs": factor, "seconds_to_target": seconds}
        return found | {key: value for key, value in run.items() if key != "epochs"}


def score(cell: Cell, figures: dict[str, float]) -> float:
    """What is to be reached: higher is better."""
    metric = _racer.TASKS[cell.task].metric
    return -figures["loss"] if metric == "loss" else figures[metric]


def summary(
    cell: Cell, runs: dict[str, list[dict[str, Any]]], unstable: list[int]
) -> dict[str, Any]:
    """Of all contestants: score of as many epochs, seconds, share of DDP's time by seed."""
    ddp = {run["seed"]: run["seconds_to_target"] for run in runs.get(DDP, [])}
    rows = {}
    for name, found in runs.items():
        if not found:
            continue
        shares = [
            round(run["seconds_to_target"] / ddp[run["seed"]], 3)
            for run in found
            if run["seconds_to_target"] is not None and run["seed"] in ddp
        ]
        rows[name] = {
            "rate": found[0]["rate"],
            "score": round(statistics.fmean(run["score"] for run in found), 4),
            "train_seconds": round(statistics.median(run["train_seconds"] for run in found), 1),
            "shares_of_ddp_time": shares,
            "median_share": statistics.median(shares) if len(shares) == len(found) else None,
            "runs": found,
        }
    return {
        "task": cell.task,
        "hosts": cell.hosts,
        "bits_per_second": cell.bits_per_second,
        "unstable_seeds": unstable,
        "contestants": rows,
    }


def main() -> int:
    """Runs what is missing; cells that are complete are published."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=_racer.TASKS, default=[*_racer.TASKS])
    parser.add_argument("--hosts", type=int, nargs="+", help="cells of so many hosts")
    parser.add_argument("--contestants", nargs="+", choices=_racer.CONTESTANTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("runs/race"))
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    options = parser.parse_args()
    race = Race(options.folder.resolve(), options.minutes, options.timeout)
    cells = [
        cell
        for cell in CELLS
        if cell.task in options.tasks and (not options.hosts or cell.hosts in options.hosts)
    ]
    failed, complete = dict[str, str](), list[Cell]()
    unstable: dict[Cell, list[int]] = {cell: [] for cell in CELLS}
    runs: dict[Cell, dict[str, list[dict[str, Any]]]] = {
        cell: {name: [] for name in _racer.CONTESTANTS} for cell in CELLS
    }
    try:
        with ends_as_ctrl_c():
            for cell in cells:
                chosen = options.contestants or _racer.CONTESTANTS
                names = (DDP, *(name for name in chosen if name != DDP))
                rates = {name: race.rate(cell, name) for name in names}
                for seed in range(3 * options.seeds):
                    if seed - len(unstable[cell]) == options.seeds:
                        break
                    target = None
                    for name in names:
                        try:
                            found = race.contestant(cell, name, rates[name], seed, target)
                        except FailedRunError as error:
                            failed[f"{cell.task}, {cell.hosts} hosts, {name}, {seed}"] = str(error)
                            print(f"{cell.task}, {name}, {seed}: failed: {error}", flush=True)
                            if name == DDP:
                                break
                            continue
                        if name == DDP and race.is_unstable(cell, found):
                            unstable[cell].append(seed)
                            break
                        target = found["score"] if name == DDP else target
                        runs[cell][name].append(found)
                if options.seeds >= SEEDS and not (options.contestants or failed):
                    complete.append(cell)
    except TimeoutError:
        print(f"stopped after {options.minutes:g} minutes: the rest is for next time")
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 2
    rows = {cell: summary(cell, runs[cell], unstable[cell]) for cell in cells if runs[cell][DDP]}
    print(
        write("race", {"rows": [*rows.values()], "failed": failed}, path=race.folder / "race.json")
    )
    if complete:
        published = merged("race", [rows[cell] for cell in complete], "task", "hosts")
        print(write("race", {"rows": published}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
