"""Larger workloads at equal epochs: a residual network on CIFAR-10, a GPT on Shakespeare.

Like `accuracy`, with the networks that are too slow for five seeds on a small machine. CIFAR-10 is
the small archive (10,000 + 2,000 images, re-encoded as JPEG): compare its rows with each other, not
with published accuracies. The accuracy of the GPT is the share of next characters predicted right.

    python -m benchmarks.workloads
"""

import argparse
from pathlib import Path

from benchmarks._common import write
from benchmarks.accuracy import CONTESTANTS, Task, compare

CIFAR = ("--data", "cifar10-small", "--model", "resnet20", "--batch-size", "32", "--lr", "0.1")
SHAKESPEARE = ("--data", "shakespeare", "--model", "gpt", "--optimizer", "adamw")
TASKS = [
    Task("CIFAR-10 small, ResNet-20", 4, (*CIFAR, "--epochs", "5", "--warmup-epochs", "1")),
    # Adam divides by moments of its own gradients: what each rank keeps to itself may matter here.
    Task(
        "Shakespeare, GPT",
        4,
        (
            *SHAKESPEARE,
            "--batch-size",
            "4",
            "--lr",
            "0.002",
            "--epochs",
            "2",
            "--warmup-epochs",
            "1",
        ),
        tuple(CONTESTANTS),
    ),
]


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/workloads"))
    options = parser.parse_args()
    rows = [compare(task, options.seeds, options.folder) for task in TASKS]
    print(write("workloads", {"rows": rows}))


if __name__ == "__main__":
    main()
