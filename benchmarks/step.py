"""A training step by gossip against DDP: two processes on loopback, compute-bound models.

Contestants take turns in the same two processes, as `_steps` has it.

    python -m benchmarks.step
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import write
from benchmarks._steps import measure
from benchmarks._two_ranks import WORLD_SIZE


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that costs nothing."""
    return model(x).square().mean()


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def residual_network() -> tuple[nn.Module, Callable, Callable]:
    """ResNet-20 in width 16-32-64 on 32 x 32 images: 0.27 million parameters."""
    widths = (
        [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    )
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, lambda: (torch.randn(16, 3, 32, 32),), mean_square


class CharacterModel(nn.Module):
    """A GPT of 4 layers, width 256, context 128: 3.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 256)
        self.place = nn.Parameter(torch.zeros(128, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 65)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x) + self.place, mask, is_causal=True))


def character_model() -> tuple[nn.Module, Callable, Callable]:
    """The model and its batches."""
    return CharacterModel(), lambda: (torch.randint(65, (4, 128)),), mean_square


TASKS = {"ResNet-20": residual_network, "GPT, 4 layers": character_model}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    options = parser.parse_args()
    rows = measure(TASKS, options.blocks, options.steps)
    for task, row in rows.items():
        print(task)
        for name, value in row.items():
            print(f"  {name:20}", value)
    print(write(Path(__file__).stem, {"world_size": WORLD_SIZE, "threads": 1, "tasks": rows}))


if __name__ == "__main__":
    main()
