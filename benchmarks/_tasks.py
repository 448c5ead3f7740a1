"""Data in memory for what trains in one process: images of Fashion-MNIST, windows of a text."""

import math

import torch
from torch import Tensor, nn

from gossipgrad import data

Part = tuple[Tensor, Tensor]


def whole(name: str) -> tuple[Part, Part]:
    """Inputs and labels of a data set: all to train on, all to test with."""
    dataset = data.load(name)
    train, test = (part.batch(torch.arange(len(part))) for part in (dataset.train, dataset.test))
    return train, test


@torch.no_grad()
def accuracy(model: nn.Module, test: Part) -> float:
    """The share of the test part that is predicted right."""
    model.eval()
    pairs = zip(test[0].split(1000), test[1].split(1000), strict=True)
    right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in pairs)
    model.train()
    return right / test[1].numel()


def cosine(peak: float, step: int, steps: int, warm_up_steps: int = 0) -> float:
    """Linear to the peak, then a cosine to 0."""
    if step < warm_up_steps:
        return peak * (step + 1) / warm_up_steps
    done = (step - warm_up_steps) / (steps - warm_up_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


class Text:
    """Random windows of tiny Shakespeare."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.vocabulary = data.info("shakespeare").num_classes
        self._parts = [
            (torch.cat(list(inputs)).long(), torch.cat(list(labels)).long())
            for inputs, labels in whole("shakespeare")
        ]

    def windows(self, part: int, generator: torch.Generator, count: int) -> Part:
        """Characters and those that follow them, of the training part (0) or the other (1)."""
        inputs, labels = self._parts[part]
        starts = torch.randint(len(inputs) - self.context, (count,), generator=generator)
        positions = starts[:, None] + torch.arange(self.context)
        return inputs[positions], labels[positions]
