"""Small networks with neurons that can go, and plans for them."""

import torch
from torch import Tensor, nn

import gossipgrad as gg
from gossipgrad.apoptosis import Consumer, ShrinkPlan

INTERIOR = slice(2, -2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def consumer_of_samples(h: Tensor, v: Tensor) -> Consumer:
    """What a linear layer reads that has a bias, with exact moments."""
    centred, y = h - h.mean(0), h @ v.T
    second = (centred.T @ centred / len(h))[None, :, None]
    scale = float(y.var(0, unbiased=False).sum())
    return Consumer(v[:, None], second, h.mean(0)[None], scale, 1e12)


def seen(
    model: nn.Module,
    example: Tensor,
    batches: list[Tensor],
    *,
    budget: float,
    optimizer: torch.optim.Optimizer | None = None,
    **settings,
) -> ShrinkPlan:
    """The plan of a session that has seen these batches, and is closed."""
    made = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"min_width": 1, **settings}
    with gg.shrink(model, made, example_input=example, **settings) as session:
        session.look()
        mode = model.training
        model.train()
        buffers = [(b, b.clone()) for b in model.buffers()]
        with torch.no_grad():
            for batch in batches:
                model(batch)
            for buffer, value in buffers:
                buffer.copy_(value)
        model.train(mode)
        return session.plan(budget)


def _network(activation: nn.Module) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 7), activation, nn.Linear(7, 3)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(0.7 * random(*p.shape, seed=20 + number))
    return model, random(50, 4, seed=1), random(50, 3, seed=2)


def parallel() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Neuron 5 is twice neuron 1."""
    model, x, target = _network(nn.ReLU())
    with torch.no_grad():
        model[0].weight[5] = 2 * model[0].weight[1]
        model[0].bias[5] = 2 * model[0].bias[1]
    return model, x, target


def mirrored() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Neuron 5 is neuron 1 of the opposite sign."""
    model, x, target = _network(nn.Tanh())
    with torch.no_grad():
        model[0].weight[5] = -model[0].weight[1]
        model[0].bias[5] = -model[0].bias[1]
    return model, x, target


def saturated() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Neuron 5 is 0 for all inputs."""
    model, x, target = _network(nn.ReLU())
    with torch.no_grad():
        model[0].weight[5] = 0
        model[0].bias[5] = -1
    return model, x, target
