"""The metric of the test part, alone or shared out over the ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gossipgrad.checkpoint import model_tensors
from gossipgrad.data import made_ahead, shard_bounds

from ._job import Job, tensors_of, to_device

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
    """Mean of the metric over the whole test part: of labels, the share of 1 that is right."""
    is_consensus: bool
    """Whether the model stands for all ranks, or is this rank's own replica."""
    consensus_distance: float | None
    """Exact, where it was measured."""
    final: bool
    """Whether this was the last one: a rank asked for that, here or elsewhere."""
    weights: dict[str, Tensor]
    """What `checkpoint.model_tensors` gave for the evaluated model if it is final or the best;
    empty otherwise."""
    disagreement: float | None = None
    """How far the replicas' predictions are apart, where it was measured."""


class TestPart:
    """The test part, and which share of it this rank evaluates when all do it together."""

    __test__ = False  # no test case, whatever its name

    def __init__(
        self,
        job: Job,
        *,
        rank: int,
        world_size: int,
        threads: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._samples, self._measure = job.test_samples(), job.measure
        self.metric = {"metric_name": job.metric_name, "metric_format": job.metric_format}
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._device = device or torch.device("cpu")
        self.is_best: Callable[[float], bool] = lambda accuracy: False

    def weights(self, model: nn.Module, accuracy: float, *, final: bool) -> dict[str, Tensor]:
        """A copy of the evaluated model, if it is needed."""
        return model_tensors(model) if final or self.is_best(accuracy) else {}

    @property
    def batch_size(self) -> int:
        """Samples evaluated at once."""
        return self._sizes[0]

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Samples evaluated at once, and samples of the probe: few of large ones, and of texts."""
        x, y = self._samples.batch(torch.arange(1))
        if y.numel() > 1:
            return _TEXT_BATCH_SIZE, _PROBE_TEXTS
        values = max((tensor.numel() for tensor in tensors_of(x)), default=1)
        return min(_MAX_BATCH_SIZE, max(1, _BATCH_VALUES // values)), _PROBE_SAMPLES

    def accuracy(self, model: nn.Module) -> float:
        """Mean of the metric over the whole test part; of labels, the share that is right."""
        return mean_of(self._sum(model, 0, len(self._samples)))

    def probe(self) -> Any:
        """The inputs of the first samples, the same on every rank, where the model is."""
        count = min(len(self._samples), self._sizes[1])
        return to_device(self._samples.batch(torch.arange(count))[0], self._device)

    def sum_share(
        self, model: nn.Module, members: Sequence[int] | None = None
    ) -> Float[Tensor, "2"]:
        """Sum and number of the metric's values of this rank's share; shares are disjoint."""
        ranks = range(self._world_size) if members is None else members
        start, end = shard_bounds(len(self._samples), ranks.index(self._rank), len(ranks))
        return self._sum(model, start, end)

    @torch.no_grad()
    def _sum(self, model: nn.Module, start: int, end: int) -> Float[Tensor, "2"]:
        was_training = model.training
        model.eval()
        try:
            total = torch.zeros(2, dtype=torch.float64)
            chosen = torch.arange(start, end).split(self.batch_size)
            for x, y in made_ahead(self._samples.batch, chosen, threads=self._threads):
                outputs = model(to_device(x, self._device))
                values = self._measure(outputs, y.to(self._device))
                total += torch.tensor(
                    [float(values.double().sum()), values.numel()], dtype=torch.float64
                )
            return total
        finally:
            model.train(was_training)


def mean_of(total: Float[Tensor, "2"]) -> float:
    """The mean of values whose sum and number are given, NaN of none."""
    values, count = total.tolist()
    return values / count if count else math.nan
