"""Sparse sessions on threads, and the reference beside them."""

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
    "Rank",
    "assume_costs",
    "backward_of",
    "on_ranks",
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


class Rank:
    """One rank in its session, its model, optimizer and scaler; steps are numbered from 0."""

    def __init__(self, rank: int, group: Group, model, optimizer, session, scaler) -> None:
        self.rank, self.group, self.scaler = rank, group, scaler
        self.model: nn.Sequential = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.session: gg.SparseSession = session
        self.steps = 0

    def backward(self, step: int | None = None) -> None:
        """A backward pass of the step that comes next, or of another."""
        backward_of(self.model, self.rank, self.steps if step is None else step)

    def train(self, steps: int = 1) -> None:
        """Makes some steps."""
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.steps += 1

    def train_until_decided(self) -> None:
        """Makes steps until the plan is final, after the same step on all ranks."""
        planner = self.session._planner
        assert planner is not None
        while not planner.decided:
            self.train()

    def scaled_backward(self, x: torch.Tensor) -> None:
        """A backward pass of a scaled loss; gradients add up."""
        self.scaler.scale(self.model(x).square().mean()).backward()

    def scaled_step(self) -> None:
        """The step of the scaler, and its update."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> list[torch.Tensor]:
        """A copy of the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    def gradients(self) -> list[torch.Tensor]:
        """A copy of the gradients."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def carried(self, kind: str = "residuals") -> dict[str, torch.Tensor]:
        """What a state holds of that kind, by name of a parameter."""
        return self.session.state_dict()["session"][kind]


def on_ranks(
    use: Callable[[Rank], Any],
    plan: Any = "layerwise",
    *,
    world_size: int = 2,
    make: Callable[[], nn.Module] = network,
    optimizer: Callable = torch.optim.SGD,
    scales: bool = False,
    together: bool = True,
    **settings: Any,
) -> list[Any]:
    """What `use(me)` returns on each rank; they leave together, or as soon as each is done."""
    settings = {"density": 0.2, "plan": plan, **settings}

    def rank_main(rank: int, group: Group) -> Any:
        model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        made = optimizer(model.parameters(), lr=0.1)
        more = {"scaler": scaler} if scales else {}
        with gg.sparsify(model, made, process_group=group, **settings, **more) as session:
            result = use(Rank(rank, group, model, made, session, scaler))
            if together:
                group.barrier()
        return result

    return run_ranks(world_size, rank_main)


def states_after(
    steps: int,
    world_size: int = 2,
    *,
    states: Sequence[dict[str, Any]] | None = None,
    **settings,
) -> list[dict[str, Any]]:
    """The states of all ranks so many steps after `states`, or after their start."""

    def use(me: Rank) -> dict[str, Any]:
        if states is not None:
            me.session.load_state_dict(states[me.rank])
        me.train(steps)
        me.group.barrier()
        return me.session.state_dict()

    return on_ranks(use, world_size=world_size, **settings)


def same_weights(told: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether all ranks hold the same, to the bit."""
    return all(torch.equal(a, b) for other in told[1:] for a, b in zip(told[0], other, strict=True))


def assume_costs(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Nothing is measured: costs grow from nothing to these for 1,000 elements, by method."""

    def curve(most: float) -> PiecewiseCost:
        return PiecewiseCost(sizes=(1.0, 1000.0), seconds=(1e-9, most))

    def assumed(
        settings: Any, *_: object, **__: object
    ) -> Generator[None, None, tuple[list[Method], None]]:
        yield
        methods = [Method(name, curve(1e-9), curve(seconds[name])) for name in settings.methods]
        return methods, None

    monkeypatch.setattr(_planner, "measure_methods", assumed)


def slow_down(group: Group, act: Callable[[str, int], object]) -> None:
    """Has `act(method, bytes)` happen in the collectives of a group before they begin."""
    all_reduce_, all_gather_into_ = group.all_reduce_, group.all_gather_into_

    def slow_all_reduce_(tensor: torch.Tensor) -> torch.Tensor:
        act("dense", tensor.nbytes)
        return all_reduce_(tensor)

    def slow_all_gather_into_(gathered: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        act("sparse", mine.nbytes)
        return all_gather_into_(gathered, mine)

    group.all_reduce_ = slow_all_reduce_
    group.all_gather_into_ = slow_all_gather_into_


def train(
    world_size: int,
    steps: int,
    *,
    optimizer: Callable = sgd,
    dtype: torch.dtype = torch.float32,
    width: int = 8,
    backward: Callable[[nn.Module, int, int], None] = backward_of,
    look: Callable[[gg.SparseSession], object] = lambda session: None,
    **settings,
) -> list:
    """What the ranks hold after training, and what `look(session)` saw at the end."""

    def rank_main(rank: int, group: Group):
        model = network(seed=rank, dtype=dtype, width=width)
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
    width: int = 8,
    backward: Callable[[nn.Module, int, int], None] = backward_of,
    **settings,
) -> Reference:
    models = [network(dtype=dtype, width=width) for _ in range(world_size)]
    optimizers = [optimizer(list(model.parameters())) for model in models]
    reference = Reference(models, optimizers, groups, **settings)
    for step in range(steps):
        for rank, model in enumerate(models):
            backward(model, rank, step)
        reference.step()
    return reference
