"""Ranks that are kept together and have statistics of their own."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.train import PostLocalConfig, TrainConfig
from gossipgrad.train._evaluate import TestPart
from gossipgrad.train._spans import StepSpans
from gossipgrad.train._strategies import make_strategy

__all__ = ["STEPS", "evaluated", "statistics"]

STEPS = 8


def evaluated(rank: int, store: object, name: str) -> tuple[float, float, float, float]:
    """Accuracy as reported, accuracy of what is exported, its and this rank's own statistic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
    bound: Any = model[2]
    with torch.no_grad():
        bound.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        bound.bias.zero_()
    norm: Any = model[1]
    x = torch.linspace(0, 10, 40).reshape(40, 1, 1, 1)
    part = TensorSamples(x, (x.flatten() > 5).long())
    info = DatasetInfo(
        name="line", input_shape=(1, 1, 1), num_classes=2, train_samples=40, test_samples=40
    )
    test = TestPart.of(Dataset(info=info, train=part, test=part), rank=rank, world_size=2)
    strategy = make_strategy(
        TrainConfig(strategy=name),
        model,
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        total_steps=1,
        stop=threading.Event(),
        spans=StepSpans(rank, num_steps=0, total_steps=1),
    )
    norm.running_mean.fill_(10.0 * rank)  # as after a step on its own samples
    evaluation = strategy.evaluate(test, final=True)
    own = float(norm.running_mean)
    model.load_state_dict(evaluation.weights)
    exported = test.accuracy(model)
    strategy.close()
    return evaluation.accuracy, exported, float(norm.running_mean), own


def statistics(rank: int, store: object, names: tuple[str, ...]) -> dict[str, tuple[float, int]]:
    """The running mean after real steps on samples around 10 (rank + 1), and their count."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
        norm: Any = model[0]
        norm.momentum = 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = make_strategy(
            TrainConfig(
                strategy=name, post_local=PostLocalConfig(post_local_after=0.5, local_steps=2)
            ),
            model,
            [optimizer],
            total_steps=STEPS,
            stop=threading.Event(),
            spans=StepSpans(rank, num_steps=0, total_steps=STEPS),
        )
        for _ in range(STEPS):
            strategy.begin_step()
            x = 10.0 * (rank + 1) + torch.tensor([[-1.0], [0.0], [1.0]])
            strategy.backward(strategy.model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        strategy.close()
        found[name] = float(norm.running_mean), int(norm.num_batches_tracked)
    return found
