"""A step of the paper's ImageNet models by gossip against DDP: two processes on loopback.

Images are random, 224 x 224. Contestants take turns in the same two processes; their peak memory
is taken in processes of their own.

    python -m benchmarks.images
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks._common import write
from benchmarks._steps import measure, peak_memory_bytes
from benchmarks._two_ranks import WORLD_SIZE
from gossipgrad.models import GoogLeNet, ResNet50, training_loss

BATCH_SIZE = 4
CLASSES = 1000


def images() -> tuple[Tensor, Tensor]:
    """A batch of noise."""
    return torch.randn(BATCH_SIZE, 3, 224, 224), torch.randint(CLASSES, (BATCH_SIZE,))


def resnet50() -> tuple[nn.Module, Callable, Callable]:
    """25.6 million parameters."""
    return ResNet50(CLASSES), images, training_loss


def googlenet() -> tuple[nn.Module, Callable, Callable]:
    """13.0 million parameters, auxiliary heads included."""
    return GoogLeNet(CLASSES), images, training_loss


TASKS = {"ResNet-50": resnet50, "GoogLeNet": googlenet}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    options = parser.parse_args()
    if options.blocks < 2 or options.steps < 1:
        parser.error("quartiles need 2 blocks or more, of 1 step or more")
    rows = measure(TASKS, options.blocks, options.steps)
    for title, task in TASKS.items():
        for name, peak in peak_memory_bytes(task, 3).items():
            rows[title][name]["peak_memory_bytes"] = peak
    for title, row in rows.items():
        print(title)
        for name, value in row.items():
            print(f"  {name:20}", value)
    settings = {"world_size": WORLD_SIZE, "threads": 1, "batch_size": BATCH_SIZE, "tasks": rows}
    print(write(Path(__file__).stem, settings))


if __name__ == "__main__":
    main()
