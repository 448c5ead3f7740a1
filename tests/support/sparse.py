"""Sparse sessions on threads, and the reference beside them."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Group
from gossipgrad.planning import Method, PiecewiseCost
from gossipgrad.sparsification import _planner
from gossipgrad.sparsification._reference import Reference
from support.ranks import run_ranks
from support.replicas import network, sgd

__all__ = [
    "assume_costs",
    "backward_of",
    "same_weights",
    "slow_down",
    "start",
    "states_after",
    "train",
    "train_reference",
]


def backward_of(model: nn.Module, rank: int, step: int, count: int = 5) -> None:
    """A backward pass on a batch that depends on rank and step alone; gradients are new."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    model.zero_grad()
    batch = torch.randn(count, 6, generator=generator).to(model[0].weight.dtype)
    target = torch.randn(count, 3, generator=generator)
    (model(batch).float() - target).square().mean().backward()


def start(
    group: Group | None, plan: str = "layerwise", *, model: nn.Module | None = None, **settings
) -> tuple[nn.Module, torch.optim.Optimizer, gg.SparseSession]:
    """A model, what trains it, and their session."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"density": 0.2, **settings}
    session = gg.sparsify(model, optimizer, process_group=group, plan=plan, **settings)
    return model, optimizer, session


def states_after(
    steps: int,
    world_size: int = 2,
    *,
    states: Sequence[dict[str, Any]] | None = None,
    **settings,
) -> list[dict[str, Any]]:
    """The states of all ranks so many steps after `states`, or after their start."""

    def rank_main(rank: int, group: Group) -> dict[str, Any]:
        model, optimizer, session = start(group, **settings)
        with session:
            if states is not None:
                session.load_state_dict(states[rank])
            for step in range(steps):
                backward_of(model, rank, step)
                optimizer.step()
            session.group.barrier()
            return session.state_dict()

    return run_ranks(world_size, rank_main)


def same_weights(told: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all ranks hold the same, to the bit."""
    return all(torch.equal(a, b) for other in told[1:] for a, b in zip(told[0], other, strict=True))


def assume_costs(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Nothing is measured: costs grow from nothing to these for 1,000 elements, by method."""

    def curve(most: float) -> PiecewiseCost:
        return PiecewiseCost(sizes=(1.0, 1000.0), seconds=(1e-9, most))

    def assumed(settings: Any, *_: object, **__: object) -> Generator[None, None, list[Method]]:
        yield
        return [Method(name, curve(1e-9), curve(seconds[name])) for name in settings.methods]

    monkeypatch.setattr(_planner, "measure_methods", assumed)


def slow_down(group: Group, *, dense_seconds: float = 0.0, bytes_per_second: float = 1e12) -> None:
    """Gives the collectives of a group the speed of a slow network, and all-reduces some more."""
    all_reduce_, all_gather_into_ = group.all_reduce_, group.all_gather_into_

    def slow_all_reduce_(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(dense_seconds + tensor.nbytes / bytes_per_second)
        return all_reduce_(tensor)

    def slow_all_gather_into_(gathered: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        time.sleep(mine.nbytes / bytes_per_second)
        return all_gather_into_(gathered, mine)

    group.all_reduce_ = slow_all_reduce_
    group.all_gather_into_ = slow_all_gather_into_


def train(
    world_size: int,
    steps: int,
    *,
    optimizer: Callable = sgd,
    dtype: torch.dtype = torch.float32,
    backward: Callable[[nn.Module, int, int], None] = backward_of,
    look: Callable[[gg.SparseSession], object] = lambda session: None,
    **settings,
) -> list:
    """What the ranks hold after training, and what `look(session)` saw at the end."""

    def rank_main(rank: int, group: Group):
        model = network(seed=rank, dtype=dtype)
        o = optimizer(list(model.parameters()))
        with gg.sparsify(model, o, process_group=group, **settings) as session:
            for step in range(steps):
                backward(model, rank, step)
                o.step()
            seen = look(session)
            session.group.barrier()
        return [p.detach().clone() for p in model.parameters()], seen

    return run_ranks(world_size, rank_main)


def train_reference(
    world_size: int,
    steps: int,
    groups: list[int],
    *,
    optimizer: Callable = sgd,
    dtype: torch.dtype = torch.float32,
    backward: Callable[[nn.Module, int, int], None] = backward_of,
    **settings,
) -> Reference:
    models = [network(dtype=dtype) for _ in range(world_size)]
    optimizers = [optimizer(list(model.parameters())) for model in models]
    reference = Reference(models, optimizers, groups, **settings)
    for step in range(steps):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        reference.step()
    return reference
