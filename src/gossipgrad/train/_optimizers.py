"""The optimizers of a run, and their learning rates."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import gossipgrad as gg

from ._config import TrainConfig
from ._job import Job
from ._optimizer_options import SECOND_ORDER


def make_optimizers(config: TrainConfig, model: nn.Module, job: Job) -> list[Optimizer]:
    """The optimizers that together train all parameters of `model`; the job may have its own."""
    if (made := job.make_optimizers()) is not None:
        return made
    usual: dict[str, Any] = {"lr": config.peak_lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return [SGD(model.parameters(), momentum=config.momentum, **usual)]
    if config.optimizer == "adamw":
        return [AdamW(model.parameters(), **usual)]
    if config.optimizer == "gossip-adamw":
        return [gg.GossipAdamW(model.parameters(), **usual)]
    if config.optimizer in SECOND_ORDER:
        kinds = {"soap": gg.SOAP, "kl-shampoo": gg.KLShampoo, "shampoo": gg.Shampoo}
        options = config.options["second_order"]
        refresh = gg.Refresh(options.refresh_every, options.refresh_delay)
        return [kinds[config.optimizer](model, max_dim=options.max_dim, refresh=refresh, **usual)]
    # One rate and one weight decay for both: Muon's updates are as large as AdamW's.
    return [gg.Muon(model, scale="match_rms_adamw", **usual)]


def notes_on_muon(optimizers: Sequence[Optimizer]) -> list[str]:
    """What the user should know of who trains what."""
    sizes = [
        (group["role"] == "muon", parameter.numel())
        for optimizer in optimizers
        if isinstance(optimizer, gg.Muon)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    if not sizes:
        return []
    trained = sum(size for is_muon, size in sizes if is_muon)
    total = sum(size for _, size in sizes)
    return [f"Muon trains {trained:,} of {total:,} parameters, and AdamW the others"]


class Rates:
    """The learning rates of optimizers, by the position of the run."""

    def __init__(
        self, config: TrainConfig, optimizers: Sequence[Optimizer], *, steps_per_epoch: int
    ) -> None:
        self._optimizers = optimizers
        self._peaks = [[group["lr"] for group in one.param_groups] for one in optimizers]
        self._factor = partial(config.lr_factor, steps_per_epoch=steps_per_epoch)
        self.set(0)

    def set(self, step: int) -> None:
        """Set the rates of a step, counted from 0."""
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self._factor(step)
