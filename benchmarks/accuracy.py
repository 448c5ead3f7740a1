"""Is gossip as accurate as all-reduce at equal epochs?

Trains with `gossipgrad train`, the same seeds for every contestant, and pairs the accuracies of the
exported models by seed. Runs that are done are kept: an interrupted benchmark goes on where it
stopped.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --workloads    # larger ones, three seeds

CIFAR-10 is the small archive (10,000 + 2,000 images, re-encoded as JPEG): compare its rows with
each other, not with published accuracies. The accuracy of the GPT is the share of next characters
predicted right.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks._common import half_width_95, write

CONTESTANTS = {
    "allreduce": "--strategy allreduce",
    "gossip": "--strategy gossip",
    "gossip, weights+state": "--strategy gossip --payload weights+state",
}
ALL = tuple(CONTESTANTS)
FASHION = "--data fashion-mnist --model lenet --epochs 10 --lr 0.02 --batch-size"
CIFAR = "--data cifar10-small --model resnet20 --batch-size 32 --lr 0.1 --epochs 5"
SHAKESPEARE = "--data shakespeare --model gpt --optimizer adamw --batch-size 4 --lr 0.002"
# What is trained, by how many workers, with which options, and by whom.
TASKS = (
    ("digits, MLP", 4, "--data digits --model mlp --epochs 20", ALL),
    # 256 samples a step over all ranks in both, so that equal epochs are equal steps.
    ("Fashion-MNIST, LeNet", 4, f"{FASHION} 64", ALL[:2]),
    ("Fashion-MNIST, LeNet", 8, f"{FASHION} 32", ALL[:2]),
)
WORKLOADS = (
    ("CIFAR-10 small, ResNet-20", 4, f"{CIFAR} --warmup-epochs 1", ALL[:2]),
    # Adam divides by moments of its own gradients: what each rank keeps to itself may matter here.
    ("Shakespeare, GPT", 4, f"{SHAKESPEARE} --epochs 2 --warmup-epochs 1", ALL),
)


def trained(options: list[str], out: Path) -> dict:
    """The summary of a run of `gossipgrad train`; from disk if it was done before."""
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "gossipgrad", "train", *options, "--trace", "0", "--quiet"]
        subprocess.run([*command, "--out", str(out), "--overwrite"], check=True)
    return json.loads((out / "summary.json").read_text())


def compare(
    name: str, world_size: int, options: str, contestants: tuple[str, ...], seeds: int, folder: Path
) -> dict:
    """All contestants on one task, differences to all-reduce paired by seed, in points."""
    command = [*options.split(), "--nproc", str(world_size)]
    accuracies: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for seed in range(seeds):
        for contestant in contestants:
            out = f"{name}-{world_size}-{contestant}-{seed}".replace(" ", "").replace(",", "-")
            own = [*command, *CONTESTANTS[contestant].split(), "--seed", str(seed)]
            accuracies[contestant].append(trained(own, folder / out.lower())["accuracy"])
            print(name, world_size, contestant, seed, accuracies[contestant][-1], flush=True)
    differences = {
        contestant: [
            100 * (a - b)
            for a, b in zip(accuracies[contestant], accuracies["allreduce"], strict=True)
        ]
        for contestant in contestants[1:]
    }
    return {
        "task": name,
        "world_size": world_size,
        "command": f"gossipgrad train {' '.join(command)}",
        "seeds": list(range(seeds)),
        "accuracy": accuracies,
        "difference_to_allreduce_points": {
            contestant: {
                "mean": round(statistics.fmean(found), 3),
                "half_width_95": round(half_width_95(found) or 0.0, 3),
            }
            for contestant, found in differences.items()
        },
    }


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
    tasks = WORKLOADS if options.workloads else TASKS
    rows = [compare(*task, seeds, folder) for task in tasks]
    print(write(name, {"rows": rows}, module="accuracy"))


if __name__ == "__main__":
    main()
