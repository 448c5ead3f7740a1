"""The AdamW whose second moment is that of the mixed momentum."""

import math

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.simulate import VirtualRanks
from support.replicas import network


def test_it_is_the_rule_of_its_docstring():
    lr, beta1, beta2, eps, decay = 0.1, 0.8, 0.95, 1e-3, 0.02
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = gg.GossipAdamW([weight], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    w, m, v = 2.0, 0.0, 0.0

    def c(t):
        return (1 + beta1) / ((1 - beta1) * (1 - beta1 ** (2 * t)))

    for t, g in enumerate((0.3, -1.0, 0.5, 0.0, 2.0), start=1):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        if t > 1:
            v = beta2 * v + (1 - beta2) * c(t - 1) * m**2
        m = beta1 * m + (1 - beta1) * g
        u = (beta2 * v + (1 - beta2) * c(t) * m**2) / (1 - beta2**t)
        w -= lr * (decay * w + m / (1 - beta1**t) / (math.sqrt(u) + eps))
        assert weight.item() == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": float("nan")}]
)
def test_wrong_settings(wrong):
    with pytest.raises(ValueError):  # noqa: PT011
        gg.GossipAdamW(network().parameters(), **wrong)


class Gradient(nn.Module):
    """A loss whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200))

    def forward(self, x):
        return x @ self.weight


def travelled(ranks, **settings):
    """How far gradients of mean 0.3 and deviation 8 move the consensus in 60 steps."""
    torch.manual_seed(0)
    replicas = VirtualRanks(Gradient(), ranks, loss=lambda outputs, _: outputs.sum(), **settings)
    for _ in range(60):
        replicas.step(0.3 + 8 * torch.randn(ranks, 1, 200), torch.zeros(ranks, 1))
    return -replicas.consensus_model().weight.mean().item()


def test_noise_that_others_average_out_makes_no_steps_smaller():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def ours(parameters):
        return gg.GossipAdamW(parameters, lr=0.01)

    everyone = travelled(16, optimizer=adamw, strategy="allreduce")
    plain = travelled(16, optimizer=adamw, mode="sync")
    mixed = travelled(16, optimizer=ours, mode="sync", payload="weights+momentum")
    assert plain < 0.35 * everyone
    assert 0.45 * everyone < mixed < 1.2 * everyone


def test_one_moment_of_adam_does_not_travel_without_the_other():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="GossipAdamW"):
        gg.gossip(model, optimizer, mode="sync", payload="weights+momentum")
    ranks = VirtualRanks(Gradient(), 2, optimizer=torch.optim.Adam, payload="weights+momentum")
    with pytest.raises(ValueError, match="GossipAdamW"):
        ranks.step(torch.ones(2, 1, 200), torch.zeros(2, 1))


def test_a_payload_without_momentum_warns():
    model = network()
    with (
        pytest.warns(UserWarning, match="GossipAdamW"),
        gg.gossip(model, gg.GossipAdamW(model.parameters(), lr=0.01)),
    ):
        pass
