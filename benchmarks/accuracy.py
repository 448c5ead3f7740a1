"""Is gossip as accurate as all-reduce at equal epochs?

Trains with `gossipgrad train`, the same seeds for every contestant, and pairs the accuracies of the
exported models by seed. Cells that are done are kept between calls: an interrupted benchmark goes
on where it stopped.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --workloads    # larger ones, three seeds

CIFAR-10 is the small archive (10,000 + 2,000 images, re-encoded as JPEG): compare its rows with
each other, not with published accuracies. The accuracy of the GPT is the share of next characters
predicted right.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t as student

from benchmarks._common import write

CONTESTANTS = {
    "allreduce": ["--strategy", "allreduce"],
    "gossip": ["--strategy", "gossip"],
    "gossip, weights+state": ["--strategy", "gossip", "--payload", "weights+state"],
}


@dataclass(frozen=True)
class Task:
    """What is trained, and how long."""

    name: str
    world_size: int
    options: tuple[str, ...]
    contestants: tuple[str, ...] = ("allreduce", "gossip")

    @property
    def command(self) -> list[str]:
        """The options of `gossipgrad train` that all contestants share."""
        return [*self.options, "--nproc", str(self.world_size)]


FASHION = ("--data", "fashion-mnist", "--model", "lenet", "--epochs", "10", "--lr", "0.02")
DIGITS = ("--data", "digits", "--model", "mlp", "--epochs", "20")
TASKS = [
    Task("digits, MLP", 4, DIGITS, tuple(CONTESTANTS)),
    # 256 samples a step over all ranks in both, so that equal epochs are equal steps.
    Task("Fashion-MNIST, LeNet", 4, (*FASHION, "--batch-size", "64")),
    Task("Fashion-MNIST, LeNet", 8, (*FASHION, "--batch-size", "32")),
]

CIFAR = ("--data", "cifar10-small", "--model", "resnet20", "--batch-size", "32", "--lr", "0.1")
SHAKESPEARE = (
    "--data",
    "shakespeare",
    "--model",
    "gpt",
    "--optimizer",
    "adamw",
    "--batch-size",
    "4",
)
RISING = ("--warmup-epochs", "1")
WORKLOADS = [
    Task("CIFAR-10 small, ResNet-20", 4, (*CIFAR, "--epochs", "5", *RISING)),
    # Adam divides by moments of its own gradients: what each rank keeps to itself may matter here.
    Task(
        "Shakespeare, GPT",
        4,
        (*SHAKESPEARE, "--lr", "0.002", "--epochs", "2", *RISING),
        tuple(CONTESTANTS),
    ),
]


def run(task: Task, contestant: str, seed: int, folder: Path) -> dict:
    """The summary of one run; from disk if it was done before."""
    slug = "-".join(
        part.replace(" ", "").replace(",", "-").lower()
        for part in (task.name, str(task.world_size), contestant, str(seed))
    )
    out = folder / slug
    summary = out / "summary.json"
    if not summary.exists():
        command = [sys.executable, "-m", "gossipgrad", "train", *task.command]
        command += [*CONTESTANTS[contestant], "--seed", str(seed), "--trace", "0", "--quiet"]
        subprocess.run([*command, "--out", str(out), "--overwrite"], check=True)
    return json.loads(summary.read_text())


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval (Student's t)."""
    n = len(differences)
    spread = statistics.stdev(differences) / math.sqrt(n)
    return statistics.fmean(differences), float(student.ppf(0.975, n - 1)) * spread


def compare(task: Task, seeds: int, folder: Path) -> dict:
    """All contestants on one task, differences to all-reduce paired by seed, in points."""
    accuracies: dict[str, list[float]] = {name: [] for name in task.contestants}
    for seed in range(seeds):
        for name in task.contestants:
            summary = run(task, name, seed, folder)
            accuracies[name].append(summary["accuracy"])
            print(task.name, task.world_size, name, seed, summary["accuracy"], flush=True)
    row = {
        "task": task.name,
        "world_size": task.world_size,
        "command": "gossipgrad train " + " ".join(task.command),
        "seeds": list(range(seeds)),
        "accuracy": accuracies,
        "difference_to_allreduce_points": {},
    }
    for name in [name for name in task.contestants if name != "allreduce"]:
        pairs = zip(accuracies[name], accuracies["allreduce"], strict=True)
        mean, half = interval([100 * (a - b) for a, b in pairs])
        row["difference_to_allreduce_points"][name] = {
            "mean": round(mean, 3),
            "half_width_95": round(half, 3),
        }
    return row


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", action="store_true", help="the larger ones")
    parser.add_argument("--seeds", type=int, help="5, and 3 of the larger ones, unless given")
    parser.add_argument("--folder", type=Path, help="runs/NAME unless given")
    options = parser.parse_args()
    name = "workloads" if options.workloads else "accuracy"
    seeds = options.seeds or (3 if options.workloads else 5)
    folder = options.folder or Path("runs") / name
    rows = [compare(task, seeds, folder) for task in (WORKLOADS if options.workloads else TASKS)]
    print(write(name, {"rows": rows}, module="accuracy"))


if __name__ == "__main__":
    main()
