"""Strategies of the command, stepped by hand."""

import threading

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.train import TrainConfig
from gossipgrad.train._spans import StepSpans
from gossipgrad.train._strategies import Strategy, make_strategy

__all__ = ["STEPS", "loss_of", "sgd", "start", "take_step"]

STEPS = 8


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of a batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(5, 6, generator=generator)).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(
    rank: int,
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    stop: threading.Event | None = None,
    **options,
) -> Strategy:
    """The strategy of a run of so many steps."""
    return make_strategy(
        TrainConfig(strategy=name, **options),
        model,
        [optimizer],
        total_steps=STEPS,
        stop=stop or threading.Event(),
        spans=StepSpans(rank, num_steps=0, total_steps=STEPS),
    )


def take_step(strategy: Strategy, optimizer: Optimizer, rank: int, step: int) -> None:
    """Forward, backward, and the optimizer's step."""
    strategy.begin_step()
    strategy.backward(loss_of(strategy.model, rank, step))
    optimizer.step()
    optimizer.zero_grad()
