"""The learning rate of a run: how it scales with the ranks, rises at first and falls later."""

import math
from dataclasses import dataclass
from typing import Literal

LrRule = Literal["none", "linear", "sqrt"]
LrSchedule = Literal["cosine", "constant", "linear", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """The rate as a function of the step.

    Each rank keeps its batch size whatever their number, so p ranks learn from p times the samples
    a step. GossipGraD's code leaves the rate as it is and divides the number of steps by p, which
    is rule `none`; what the paper's text says of it is not known to this project. `linear` and
    `sqrt` are the usual rules for large batches.

    References:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 2: linear scaling
        and warm-up. Deviation: (1) the warm-up begins near 0, not at the rate of one rank.
    """

    base: float
    sharing_ranks: int = 1
    rule: LrRule = "none"
    schedule: LrSchedule = "cosine"
    warmup_epochs: int = 0
    step_epochs: int = 1
    gamma: float = 0.1

    @property
    def peak(self) -> float:
        """The rate that the schedule starts from."""
        powers = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
        return self.base * self.sharing_ranks ** powers[self.rule]

    def factor(
        self, step: int, *, steps_per_epoch: int, epochs: int, max_steps: int | None = None
    ) -> float:
        """The share of `peak` in a step, counted from 0."""
        warmup = self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "step":
            return self.gamma ** (step // steps_per_epoch // self.step_epochs)
        # In mode stale the last rounds of a run may lie beyond it.
        steps = min(epochs * steps_per_epoch, max_steps or math.inf)
        done = min(1.0, (step - warmup) / (steps - warmup)) if steps > warmup else 1.0
        return 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
