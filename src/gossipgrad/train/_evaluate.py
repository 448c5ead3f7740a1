"""Accuracy on the test part, alone or shared out over the ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gossipgrad.data import Dataset, Samples, made_ahead, shard_bounds

# Values in a batch of inputs; activations take many times as much memory.
_BATCH_VALUES = 1 << 20
_MAX_BATCH_SIZE = 1000
# A position of a text has activations of the model's width, and logits of its own.
_TEXT_BATCH_SIZE = 64
_PROBE_SAMPLES, _PROBE_TEXTS = 256, 16


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
    disagreement: float | None = None
    """How far the replicas' predictions are apart, where it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestPart:
    """The test part, and which share of it this rank looks at when all look together."""

    __test__ = False  # no test case, whatever its name

    samples: Samples
    num_labels: int
    """Predictions to make: one a sample, or one a position of each sample."""
    batch_size: int
    rank: int
    world_size: int
    threads: int
    """How many make batches ahead."""
    device: torch.device
    """Where the model is."""
    beat: Callable[[], None] = lambda: None
    """Called after each batch: shows that a rank that evaluates for long does not hang."""

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        *,
        rank: int,
        world_size: int,
        threads: int = 0,
        device: torch.device | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> "TestPart":
        """The test part of a data set."""
        info = dataset.info
        values = math.prod(info.input_shape)
        is_text = info.kind == "text"
        return cls(
            samples=dataset.test,
            num_labels=len(dataset.test) * (values if is_text else 1),
            batch_size=_TEXT_BATCH_SIZE
            if is_text
            else min(_MAX_BATCH_SIZE, max(1, _BATCH_VALUES // values)),
            rank=rank,
            world_size=world_size,
            threads=threads,
            device=device or torch.device("cpu"),
            beat=beat,
        )

    def accuracy(self, model: nn.Module) -> float:
        """Share of all test labels that `model` gets right."""
        return self._count_correct(model, 0, len(self.samples)) / self.num_labels

    def probe(self) -> Tensor:
        """The inputs of the first samples, the same on every rank, where the model is."""
        is_text = self.num_labels > len(self.samples)
        count = min(len(self.samples), _PROBE_TEXTS if is_text else _PROBE_SAMPLES)
        x, _ = self.samples.batch(torch.arange(count))
        return x.to(self.device)

    def count_share(
        self, model: nn.Module, members: Sequence[int] | None = None
    ) -> Int[Tensor, ""]:
        """How many labels of this rank's share `model` gets right; shares are disjoint.

        Shared out over `members`, or over all ranks.
        """
        ranks = range(self.world_size) if members is None else members
        start, end = shard_bounds(len(self.samples), ranks.index(self.rank), len(ranks))
        return torch.tensor(self._count_correct(model, start, end))

    @torch.no_grad()
    def _count_correct(self, model: nn.Module, start: int, end: int) -> int:
        was_training = model.training
        model.eval()
        try:
            correct = 0
            chosen = torch.arange(start, end).split(self.batch_size)
            for x, y in made_ahead(self.samples.batch, chosen, threads=self.threads):
                found = model(x.to(self.device)).argmax(-1)
                correct += int((found == y.to(self.device)).sum())
                self.beat()
            return correct
        finally:
            model.train(was_training)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model in memory of their own.

    Not by `state_dict()`, which a session warns of: here each rank's own replica is meant.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}
