"""Virtual ranks by themselves: what they leave alone, what they refuse."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import by_name, mixing_product
from support.virtual import MODELS, batches, sgd


def make(name="mlp", world_size=4, **settings):
    torch.manual_seed(0)
    return VirtualRanks(MODELS[name](), world_size, **{"optimizer": sgd, **settings})


def train(ranks, steps, name="mlp"):
    for _ in range(steps):
        ranks.step(*batches(name, ranks.world_size, ranks.steps))
    return ranks


@pytest.mark.parametrize("topology", ["dissemination", "hypercube", "matching"])
def test_without_gradients_the_distance_contracts_as_analysed(topology):
    p, rounds = 16, 3
    ranks = make(
        world_size=p, mode="sync", topology=topology, optimizer=lambda w: torch.optim.SGD(w, lr=0.0)
    )
    generator = torch.Generator().manual_seed(1)
    stacked = [w.detach() for w in ranks.optimizer.param_groups[0]["params"]]
    for each in stacked:
        each.normal_(generator=generator)
    before, mean = ranks.consensus_distance(), [w.mean(0) for w in stacked]
    train(ranks, rounds)
    product = mixing_product(by_name(topology, p), rounds)
    expected = float(np.linalg.norm(product - 1 / p)) / math.sqrt(p - 1)
    assert ranks.consensus_distance() / before == pytest.approx(expected, rel=0.1)
    for each, value in zip(stacked, mean, strict=True):
        torch.testing.assert_close(each.mean(0), value, atol=1e-5, rtol=1e-5)


def test_frozen_and_tied_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.first.bias.requires_grad_(False)

        def forward(self, x):
            return self.second(torch.relu(self.first(x.flatten(1))))

    torch.manual_seed(0)
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replica = train(VirtualRanks(model, 3, optimizer=sgd), 3).replica(2)
    assert replica.second.weight is replica.first.weight
    assert torch.equal(replica.first.bias, before["first.bias"])
    assert not torch.equal(replica.first.weight, before["first.weight"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the user's model stays as it is"


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ring"},
        {"topology": by_name("dissemination", 8)},
        {"payload": "gradients"},
        {"average_every": 0},
        {"wire_dtype": torch.int8},
        {"world_size": 0},
        {"optimizer": lambda p: torch.optim.LBFGS(p)},
        {"optimizer": lambda p: torch.optim.SGD(p[:1])},
        {"mode": "stale", "delay": 3},
        {"delay": 1},
        {"mode": "stale", "topology": "dissemination"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=r"."):
        make(**settings)


@pytest.mark.parametrize("model", [nn.Linear(2, 2).bfloat16(), nn.ReLU()])
def test_models_that_cannot_be_stacked_are_refused(model):
    with pytest.raises(ValueError, match=r"parameter"):
        VirtualRanks(model, 2, optimizer=sgd)


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions in full float32
    ranks = train(make("lenet"), 3, "lenet")
    torch.manual_seed(0)
    other = VirtualRanks(MODELS["lenet"]().cuda(), 4, optimizer=sgd)
    for step in range(3):
        x, y = batches("lenet", 4, step)
        other.step(x.cuda(), y.cuda())
    for a, b in zip(ranks.replica(1).parameters(), other.replica(1).parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


def test_batches_and_ranks_that_do_not_exist_are_refused():
    ranks = make()
    for call in (lambda: ranks.step(*batches("mlp", 3, 0)), lambda: ranks.replica(4)):
        with pytest.raises(ValueError, match=r"rank"):
            call()


def test_settings_that_do_nothing_warn():
    with pytest.warns(UserWarning, match="topology, mode"):
        make(strategy="local", topology="ring", mode="sync")
    with pytest.warns(UserWarning, match="payload, average_every"):
        make(strategy="allreduce", payload="weights+state", average_every=3)
