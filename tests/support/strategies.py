"""Strategies of the command, built and stepped by hand."""

import threading

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import Group
from gossipgrad.train import TrainConfig
from gossipgrad.train._spans import StepSpans
from gossipgrad.train.strategies import Replica, RunningStrategy

__all__ = ["STEPS", "build", "loss_of", "sgd", "start", "take_step"]

STEPS = 8


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of a batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(5, 6, generator=generator)).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def build(
    config: TrainConfig,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: int,
    world_size: int = 1,
    total_steps: int = STEPS,
    stop: threading.Event | None = None,
    group: Group | None = None,
) -> RunningStrategy:
    """The strategy of a run, begun."""
    replica = Replica(
        model=model,
        optimizers=[optimizer],
        stop=stop or threading.Event(),
        spans=StepSpans(rank, num_steps=0, total_steps=total_steps),
        groups=None if group is None else lambda name: group,
    )
    setting = config.setting(world_size, total_steps=total_steps)
    return config.traits.build(replica, setting, config.strategy_options)


def start(
    rank: int,
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    stop: threading.Event | None = None,
    **options,
) -> RunningStrategy:
    """The strategy of that name, of a run of so many steps."""
    return build(TrainConfig(strategy=name, **options), model, optimizer, rank=rank, stop=stop)


def take_step(strategy: RunningStrategy, optimizer: Optimizer, rank: int, step: int) -> None:
    """Forward, backward, and the optimizer's step."""
    strategy.backward(loss_of(strategy.model, rank, step))
    optimizer.step()
    optimizer.zero_grad()
