"""Fashion-MNIST in memory, for virtual ranks that train on it."""

import math

import torch
from torch import Tensor, nn

from gossipgrad import data

Part = tuple[Tensor, Tensor]


def fashion() -> tuple[Part, Part]:
    """Inputs and labels: all to train on, all to test with."""
    dataset = data.load("fashion-mnist")
    train, test = (part.batch(torch.arange(len(part))) for part in (dataset.train, dataset.test))
    return train, test


@torch.no_grad()
def accuracy(model: nn.Module, test: Part) -> float:
    """The share of the test part that is predicted right."""
    model.eval()
    pairs = zip(test[0].split(1000), test[1].split(1000), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    model.train()
    return right / len(test[1])


def cosine(peak: float, step: int, steps: int, warm_up_steps: int = 0) -> float:
    """Linear to the peak, then a cosine to 0."""
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    done = (step - warm_up_steps) / (steps - warm_up_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
