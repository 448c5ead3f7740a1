"""Random networks with neurons that can go for nothing: they compute the same without them."""

import random as dice
from itertools import pairwise

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.shrinking import random, seen

ACTIVATIONS = [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.PReLU]


class Gated(nn.Module):
    """A SwiGLU perceptron beside its input."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    """Two convolutions, the inner channels of which are nobody else's."""

    def __init__(self, width, inner, act):
        super().__init__()
        self.one = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.act = act()
        self.two = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.last(self.two(self.act(self.norm(self.one(x))))))


def network(seed):
    """A network of random layers, and inputs for it."""
    roll = dice.Random(seed)
    act = lambda: roll.choice(ACTIVATIONS)()  # noqa: E731
    kind = seed % 4
    if kind == 0:
        sizes = [roll.randint(6, 12) for _ in range(roll.randint(3, 5))]
        layers = []
        for one, two in pairwise(sizes):
            layers += [nn.Linear(one, two)]
            layers += [nn.BatchNorm1d(two)] if roll.random() < 0.4 else []
            layers += [act()] + ([nn.Dropout(0.2)] if roll.random() < 0.4 else [])
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 3)), (64, sizes[0])
    if kind == 1:
        pool = roll.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()])
        side = 4 if isinstance(pool, nn.Identity) else 2
        padding = {"padding": 1, "padding_mode": roll.choice(["zeros", "reflect", "circular"])}
        model = nn.Sequential(
            *(nn.Conv2d(2, 8, 3, padding=1, stride=2), act()),
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8), act()),
            *(nn.Conv2d(8, 6, 3, **padding), act(), pool),
            *(nn.Flatten(), nn.Linear(6 * side * side, 10), act(), nn.Linear(10, 3)),
        )
        return model, (12, 2, 8, 8)
    if kind == 2:
        wide = nn.Sequential(Gated(6, 12), nn.LayerNorm(6), Gated(6, 9), nn.Linear(6, 3))
        return wide, (8, 5, 6)
    stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
    blocks = [Residual(4, 8, roll.choice(ACTIVATIONS)), Residual(4, 7, nn.ReLU)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), (
        *(12, 2, 7, 7),
    )


@torch.no_grad()
def plant_duplicates(model):
    """Makes the last neuron of each layer but the last one the same as its first."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm1d | nn.BatchNorm2d | nn.PReLU):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.ndim and len(tensor) > 3:
                    tensor[-1] = tensor[0]


@pytest.mark.parametrize("seed", range(16))
def test_what_is_redundant_goes_and_the_function_stays(seed):
    torch.manual_seed(seed)
    model, shape = network(seed)
    model = model.double()
    x = random(*shape, seed=seed)
    for _ in range(3):
        model(x)  # statistics of BatchNorm
    plant_duplicates(model)
    model.eval()
    before = model(x).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids = [id(p) for p in model.parameters()]
    plan = seen(model, x, [x, x], budget=1e-9, optimizer=optimizer)
    assert len(plan) >= len(plan.mergings) >= 1
    again = gg.ShrinkPlan.from_state_dict(plan.state_dict())
    again.apply(model, [optimizer])
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-4, atol=1e-5)
    assert [id(p) for p in model.parameters()] == ids
    assert len(str(plan).splitlines()) == len(plan.mergings) + 1
    model.train()
    model(x).square().mean().backward()  # all follow: shapes, modules, optimizer
    optimizer.step()
    wide, _ = network(seed)
    gg.rebuild(wide.double(), model.state_dict())
    wide.eval()
    model.eval()
    torch.testing.assert_close(wide(x), model(x))
