"""Small replicas, their gradients, and the reference beside them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossipgrad as gg
from gossipgrad.comm import Group, Hub, Transport
from gossipgrad.decentralized._reference import Reference

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain_sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def gossip_adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return gg.GossipAdamW(parameters, lr=0.01)


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def network(seed: int = 0, dtype: torch.dtype = torch.float32, *, width: int = 8) -> nn.Sequential:
    """The same network in every thread: no global random numbers."""
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Gradients that depend on rank and step alone, on one stream a parameter."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = noise.to(parameter.dtype)


def backward(model: nn.Module, rank: int, step: int) -> None:
    """A real backward pass on a batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    batch = torch.randn(5, 6, generator=generator)
    model.zero_grad()
    model(batch).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters, as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


Link = str | Callable[[Group], Transport]


def transport_by_name(name: Link, world_size: int) -> Link:
    if name != "in-process":
        return name
    hub = Hub(world_size)
    return lambda group: hub.transport(group.rank)


def train_reference(
    world_size: int,
    steps: int,
    *,
    schedule: gg.topology.Schedule,
    optimizer: OptimizerFactory = sgd,
    dtype: torch.dtype = torch.float32,
    gradients: Callable[[nn.Module, int, int], None] = backward,
    **settings,
) -> Reference:
    models = [network(dtype=dtype) for _ in range(world_size)]
    optimizers = [optimizer(list(model.parameters())) for model in models]
    reference = Reference(models, optimizers, schedule, **settings)
    for step in range(steps):
        for rank, model in enumerate(models):
            gradients(model, rank, step)
        reference.step()
    return reference


def assert_same_bits(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for number, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert torch.equal(a, b), (
                f"rank {rank}, parameter {number}: {(a - b).abs().max():.3g} apart"
            )
