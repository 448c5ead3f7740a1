"""Ranks that are kept together and have statistics of their own."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossipgrad.data import Dataset, DatasetInfo, TensorSamples
from gossipgrad.train._evaluate import TestPart
from support.jobs import job_on
from support.strategies import start

__all__ = ["STEPS", "evaluated", "started", "statistics", "stopped"]

STEPS = 8


def line_dataset() -> Dataset:
    """Numbers from 0 to 10, and whether each is above 5."""
    x = torch.linspace(0, 10, 40).reshape(40, 1, 1, 1)
    part = TensorSamples(x, (x.flatten() > 5).long())
    info = DatasetInfo(
        name="line", input_shape=(1, 1, 1), num_classes=2, train_samples=40, test_samples=40
    )
    return Dataset(info=info, train=part, test=part)


def evaluated(rank: int, store: object, name: str) -> tuple[float, float, float, float]:
    """Accuracy as reported, accuracy of what is exported, its and this rank's own statistic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
    bound: Any = model[2]
    with torch.no_grad():
        bound.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        bound.bias.zero_()
    norm: Any = model[1]
    test = TestPart(job_on(line_dataset()), rank=rank, world_size=2)
    strategy = start(rank, name, model, torch.optim.SGD(model.parameters(), lr=0.1))
    norm.running_mean.fill_(10.0 * rank)  # as after a step on its own samples
    evaluation = strategy.evaluate(test, epoch=0, final=True)
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
        strategy = start(rank, name, model, optimizer)
        for _ in range(STEPS):
            x = 10.0 * (rank + 1) + torch.tensor([[-1.0], [0.0], [1.0]])
            strategy.backward(strategy.model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        strategy.close()
        found[name] = float(norm.running_mean), int(norm.num_batches_tracked)
    return found


def started(rank: int, store: object, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Parameters and buffers of a model that every rank has made with a seed of its own."""
    found = {}
    for name in names:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        norm: Any = model[0]
        norm.running_mean.fill_(rank)
        strategy = start(rank, name, model, torch.optim.SGD(model.parameters(), lr=0.01))
        found[name] = [v for t in model.state_dict().values() for v in t.flatten().tolist()]
        dist.barrier()
        strategy.close()
    return found


def stopped(rank: int, store: Any, name: str, first: int) -> tuple[int, bool, list[float]]:
    """Rank `first` gets the signal to stop, the others do not.

    How many steps were made, whether the evaluation is of a consensus, and the weights.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = threading.Event()
    strategy = start(rank, name, model, optimizer, stop)
    dataset, world_size = line_dataset(), dist.get_world_size()
    x, y = dataset.train.batch(torch.arange(rank, 40, world_size))
    for step in range(1, 1000):
        if step == 3 and rank == first:
            stop.set()
        if strategy.should_stop(step, is_asked=stop.is_set()):
            break
        strategy.backward(nn.functional.cross_entropy(strategy.forward(x), y))
        optimizer.step()
        optimizer.zero_grad()
    evaluation = strategy.evaluate(
        TestPart(job_on(dataset), rank=rank, world_size=world_size), epoch=0, final=True
    )
    dist.barrier()
    strategy.close()
    weights = [v for p in model.parameters() for v in p.flatten().tolist()]
    return step - 1, evaluation.is_consensus, weights
