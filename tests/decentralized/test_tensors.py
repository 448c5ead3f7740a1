"""Whatever a model or optimizer holds: the right tensors travel, others are refused by name."""

from functools import partial

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.replicas import adam, network, plain_sgd
from support.sessions import run_sessions

OPTIMIZERS = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_with_its_state_in_the_payload(name):
    def use(me):
        me.train(8)
        me.session.average_()
        assert torch.isfinite(me.weights()).all()
        return [t.clone() for s in me.optimizer.state.values() for t in s.values()]

    for one, other in zip(
        *run_sessions(2, use, optimizer=OPTIMIZERS[name], payload="weights+state"), strict=True
    ):
        assert name == "Adafactor" or not one.ndim or torch.equal(one, other)


def test_an_optimizer_that_needs_a_closure_is_refused_with_state_and_works_without():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(gg.GossipError, match=r"LBFGS .* use payload='weights'"):
        gg.gossip(model, optimizer, payload="weights+state")
    with gg.gossip(model, optimizer):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class Odd(nn.Module):
    """Tied, frozen, empty, mixed in type, never used, and laid out channels-last."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Linear(6, 6).double()
        self.unused = nn.Linear(6, 6)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, x):
        hidden = self.frozen(self.tied(self.embed(x))) + self.narrow.float()
        image = self.conv(x[:, :1, None, None].expand(-1, 2, 3, 3))
        return self.wide(hidden.double()).float() + image.flatten(1).sum(1, keepdim=True)


def loss_of_noise(model, rank, step):
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + step))
    model(x).square().mean().backward()


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "shared-mask:0.5"},
        {"mode": "sync", "payload": "weights+state"},
        {"payload": "gradients+weights"},
    ],
    ids=str,
)
def test_odd_models(settings):
    def use(me):
        model = me.model
        frozen, unused = model.frozen.weight.clone(), model.unused.weight.detach().clone()
        me.train(6)
        assert model.unused.weight.grad is None
        assert model.unused.weight not in me.optimizer.state
        torch.testing.assert_close(model.unused.weight.detach(), unused, rtol=0, atol=1e-6)
        assert torch.equal(model.frozen.weight, frozen)
        assert model.tied.weight is model.embed.weight
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        me.session.average_()
        return [p.detach().clone() for p in model.parameters()]

    settings = {"bucket_bytes": 64, "gradients": loss_of_noise, **settings}
    results = run_sessions(3, use, make=lambda rank: Odd(), optimizer=adam, **settings)
    for mine, other in zip(results[0], results[1], strict=True):
        assert torch.equal(mine, other)


def test_backward_passes_of_a_step_add_up_or_train_other_parameters():
    def use(me):
        model, x = me.model, torch.ones(1, 6)
        model[0](x * me.rank).sum().backward()
        model[0](x).sum().backward()
        model[1](x * me.rank).sum().backward()
        me.optimizer.step()
        assert (model[0].weight.grad == 1.5).all()
        assert (model[1].weight.grad == 0.5).all()

    make = lambda rank: nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])  # noqa: E731
    # In buckets of one layer each.
    run_sessions(2, use, make=make, payload="gradients+weights", bucket_bytes=32)


def test_gradients_are_clipped_after_they_are_mixed():
    def use(me):
        weight, optimizer = me.model.weight, me.optimizer
        (weight.sum() * (100.0 - 50 * me.rank)).backward()
        me.session.synchronize()
        assert weight.grad.item() == 75.0
        nn.utils.clip_grad_norm_(me.model.parameters(), 1.0)
        optimizer.step()
        assert weight.grad.item() == pytest.approx(1.0, rel=1e-4)
        optimizer.zero_grad()
        (weight.sum() * (100.0 - 50 * me.rank)).backward()
        weight.grad = weight.grad * 0.5
        optimizer.step()
        assert weight.grad.item() == 37.5
        optimizer.zero_grad(set_to_none=True)  # a rank may drop its batch
        optimizer.step()

    make = lambda rank: nn.Linear(1, 1, bias=False)  # noqa: E731
    run_sessions(2, use, make=make, payload="gradients+weights")


@pytest.mark.parametrize("payload", ["weights", "gradients+weights"])
def test_sparse_gradients_are_refused_only_where_gradients_travel(payload):
    def use(me):
        me.model(torch.tensor([1])).sum().backward()
        if payload == "weights":
            me.optimizer.step()
        else:
            with pytest.raises(ValueError, match="'weight' is sparse"):
                me.optimizer.step()

    make = lambda rank: nn.Embedding(4, 3, sparse=True)  # noqa: E731
    run_sessions(2, use, make=make, optimizer=plain_sgd, payload=payload)


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()]
)
def test_what_has_no_average_is_refused_by_name(weight):
    model = nn.ParameterList([nn.Parameter(weight)])
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    with pytest.raises(ValueError, match="'0'"):
        gg.gossip(model, optimizer)
