"""Time to the same accuracy with apoptosis beside gossip, in real training on a shaped network.

As in `time_to_accuracy`: every worker is a host behind a link of its own, computes for real, and
shares this machine's processors with the others. The target of a seed is half a point less than
the final accuracy that DistributedDataParallel has with it; all contestants run as many epochs.
Runs that are done are kept.

Needs what `benchmarks.netlab` needs: Linux, root, iproute2.

    python -m benchmarks.apoptosis_time_to_accuracy [--seeds 3] [--world-size 4]
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._alone import BusyError, alone
from benchmarks._common import write
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError
from benchmarks.time_to_accuracy import (
    BUSY,
    FailedRunError,
    Run,
    Task,
    curve,
    figures_of,
    seconds_to,
    train,
)

_NAME = "apoptosis_time_to_accuracy"
_LESS = 0.005  # than the final accuracy of DDP: what counts as parity
DDP, GOSSIP, BOTH = "DDP", "gossip", "gossip and apoptosis"
CONTESTANTS = {
    BOTH: ("gossip", "--apoptosis", "0.0045"),
    GOSSIP: ("gossip",),
    DDP: ("allreduce",),
}


@dataclass(frozen=True)
class WideTask(Task):
    """What is trained, on how many hosts, behind which links."""

    def command(self, contestant: str, seed: int) -> list[str]:
        """The words after `gossipgrad`."""
        words = ["train", *self.options, "--epochs", str(self.epochs)]
        return [*words, "--strategy", *CONTESTANTS[contestant], "--seed", str(seed), "--trace", "0"]

    def folder(self, contestant: str, seed: int, base: Path) -> Path:
        """Where a run is kept."""
        return base / f"{self.world_size}-{contestant.lower().replace(' ', '-')}-{seed}"


_OPTIONS = ("--data", "fashion-mnist", "--model", "mlp-wide", "--lr", "0.1", "--batch-size", "128")
TASKS = [
    WideTask("Fashion-MNIST, MLP 784-1024-1024-10", world_size, 1e8, 3, _OPTIONS)
    for world_size in (4, 8)
]


def row(task: WideTask, base: Path, seeds: int) -> dict[str, Any]:
    """What is there of a task, by contestant and seed, and shares of times to the target."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    shares: dict[str, list[float | None]] = {GOSSIP: [], DDP: []}
    for seed in range(seeds):
        outs = {name: task.folder(name, seed, base) for name in CONTESTANTS}
        if not all(out.exists() for out in outs.values()):
            continue
        target = curve(outs[DDP])[-1][1] - _LESS
        times = {}
        for name, out in outs.items():
            figures = figures_of(out, seed)
            times[name] = seconds_to(figures["curve"], target)
            runs[name].append({**figures, "target": target, "seconds_to_target": times[name]})
        for name, found in shares.items():
            both, other = times[BOTH], times[name]
            found.append(None if both is None or other is None else round(both / other, 3))
    known = {name: [s for s in found if s is not None] for name, found in shares.items()}
    return {
        **task.about(CONTESTANTS),
        "runs": runs,
        "shares_of_time_by_seed": shares,
        "median_share_of_time": {
            name: statistics.median(found) for name, found in known.items() if found
        },
    }


def main() -> int:
    """Runs what is missing, a seed of each task before the next; writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--world-size", type=int, choices=[4, 8], help="of one task alone")
    parser.add_argument("--folder", type=Path, default=Path(f"runs/{_NAME}"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    options = parser.parse_args()
    base, failed = options.folder.resolve(), dict[str, str]()
    tasks = [task for task in TASKS if options.world_size in (None, task.world_size)]
    try:
        with alone(base / "lock"), ends_as_ctrl_c():
            for run in (
                Run(task, contestant, seed)
                for seed in range(options.seeds)
                for task in tasks
                for contestant in CONTESTANTS
            ):
                _once(run, base, options.timeout, failed)
                rows = [row(task, base, options.seeds) for task in TASKS]
                write(_NAME, {"rows": rows, "processors": BUSY, "failed": failed})
    except (BusyError, NetlabError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if failed else 0


def _once(run: Run, base: Path, timeout_seconds: float, failed: dict[str, str]) -> None:
    assert isinstance(run.task, WideTask)
    out = run.task.folder(run.contestant, run.seed, base)
    if out.exists():
        return
    try:
        train(run, out, timeout_seconds)
    except FailedRunError as error:
        failed[run.name] = str(error)
        print(f"{run.name}: failed: {error}", flush=True)
        return
    seconds, accuracy = curve(out)[-1]
    print(f"{run.name}: {100 * accuracy:.2f} % after {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
