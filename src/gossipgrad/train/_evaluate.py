"""Accuracy on the test part, alone or shared out over the ranks."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gossipgrad.data import Dataset, shard_bounds

_BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What an evaluation found, and of which model."""

    accuracy: float
    """Share of 1 of the whole test part."""
    is_consensus: bool
    """Whether the model stands for all ranks, or is this rank's own replica."""
    consensus_distance: float | None
    """Exact, where it was measured."""
    final: bool
    """Whether this was the last one: a rank asked for that, here or elsewhere."""
    weights: dict[str, Tensor]
    """The model that was evaluated, copied if final; empty otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestPart:
    """The test part, and which share of it this rank looks at when all look together."""

    __test__ = False  # no test case, whatever its name

    x: Float[Tensor, "sample channel height width"]
    y: Int[Tensor, " sample"]
    rank: int
    world_size: int

    @classmethod
    def of(cls, dataset: Dataset, *, rank: int, world_size: int) -> "TestPart":
        """The test part of a data set."""
        return cls(x=dataset.test_x, y=dataset.test_y, rank=rank, world_size=world_size)

    def accuracy(self, model: nn.Module) -> float:
        """Share of all test samples that `model` gets right."""
        return _count_correct(model, self.x, self.y) / len(self.y)

    def count_share(self, model: nn.Module) -> Int[Tensor, ""]:
        """How many samples of this rank's share `model` gets right; shares are disjoint."""
        start, end = shard_bounds(len(self.y), self.rank, self.world_size)
        return torch.tensor(_count_correct(model, self.x[start:end], self.y[start:end]))


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model in memory of its own."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def _count_correct(
    model: nn.Module,
    x: Float[Tensor, "sample channel height width"],
    y: Int[Tensor, " sample"],
) -> int:
    was_training = model.training
    model.eval()
    try:
        return sum(
            int((model(inputs).argmax(1) == labels).sum())
            for inputs, labels in zip(x.split(_BATCH_SIZE), y.split(_BATCH_SIZE), strict=True)
        )
    finally:
        model.train(was_training)
