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
from benchmarks._vision import googlenet, resnet50, vision_loss

BATCH_SIZE = 4
CLASSES = 1000


def images() -> tuple[Tensor, Tensor]:
    """A batch of noise."""
    return torch.randn(BATCH_SIZE, 3, 224, 224), torch.randint(CLASSES, (BATCH_SIZE,))


def resnet50_task() -> tuple[nn.Module, Callable, Callable]:
    """A ResNet-50 of torchvision's."""
    return resnet50(CLASSES), images, vision_loss


def googlenet_task() -> tuple[nn.Module, Callable, Callable]:
    """A GoogLeNet of torchvision's."""
    return googlenet(CLASSES), images, vision_loss


TASKS = {"ResNet-50": resnet50_task, "GoogLeNet": googlenet_task}


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
