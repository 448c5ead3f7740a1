"""Virtual ranks compute what sessions of real ranks compute, to float tolerance."""

import copy
import sys

import pytest
import torch
from torch.nn import functional as F

import gossipgrad as gg
from gossipgrad.decentralized._reference import Reference
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import by_name
from support.stale import Scripted
from support.virtual import MODELS, batches, distributed, sgd

P = 4
STEPS = 7


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def gossip_adamw(parameters):
    return gg.GossipAdamW(parameters, lr=0.01)


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]()


def simulate(name, *, steps=STEPS, optimizer=sgd, **settings):
    ranks = VirtualRanks(model_of(name), P, optimizer=optimizer, **settings)
    for step in range(steps):
        ranks.step(*batches(name, P, step))
    return ranks


def assert_same(ranks, theirs):
    for rank, held in enumerate(theirs):
        for key, model in (("own", ranks.replica(rank)), ("consensus", ranks.consensus_model())):
            for name, value in model.state_dict().items():
                if not value.is_floating_point():
                    continue
                same = torch.allclose(value, held[key][name], rtol=1e-4, atol=1e-6)
                assert same, f"rank {rank}, {key}: {name}"


@pytest.mark.parametrize("name", ["mlp", "lenet", "res"])
def test_every_model(name):
    ranks = simulate(name, seed=5)
    assert ranks.consensus_distance() > 1e-3
    assert_same(ranks, distributed(name, model_of(name), P, STEPS, seed=5))


@pytest.mark.parametrize(
    ("mode", "payload", "optimizer"),
    [
        ("sync", "weights", sgd),
        ("overlap", "weights+state", sgd),
        ("sync", "weights+state", adamw),
        ("overlap", "weights+state", adamw),
        ("sync", "weights+momentum", gossip_adamw),
    ],
)
def test_modes_and_payloads(mode, payload, optimizer):
    settings = {"mode": mode, "payload": payload, "optimizer": optimizer}
    theirs = distributed("mlp", model_of("mlp"), P, STEPS, **settings)
    assert_same(simulate("mlp", **settings), theirs)


@pytest.mark.parametrize("payload", ["weights", "weights+state"])
def test_the_published_rule_is_that_of_the_reference(payload):
    """Sessions do not have it."""
    models = [model_of("mlp") for _ in range(P)]
    reference = Reference(
        models,
        [sgd(list(model.parameters())) for model in models],
        by_name("dissemination", P),
        mode="lagged",
        payload=payload,
    )
    for step in range(STEPS):
        for model, x, y in zip(models, *batches("mlp", P, step), strict=True):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        reference.step()
    ranks = simulate("mlp", mode="lagged", payload=payload)
    for rank, model in enumerate(models):
        for a, b in zip(ranks.replica(rank).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"payload": gg.WeightsAndState(every=3)},
        {"wire_dtype": torch.bfloat16},
        {"wire_dtype": torch.bfloat16, "payload": "weights+state", "mode": "sync"},
        {"average_every": 3, "payload": "weights+state"},
        {"mode": gg.Sync(momentum=0.9), "exchanges": 2, "average_every": 4},
        {"mode": gg.Sync(momentum=0.9, overlap=True), "exchanges": 2, "average_every": 4},
        {"topology": by_name("dissemination", P, rotate=False)},
        {"topology": by_name("complete", P, seed=2)},
    ],
    ids=str,
)
def test_settings(settings):
    theirs = distributed("mlp", model_of("mlp"), P, STEPS, **settings)
    assert_same(simulate("mlp", **settings), theirs)


APART = {"mode": "sync", "every": sys.maxsize}  # sessions without partners


@pytest.mark.parametrize(
    ("settings", "session"),
    [
        (
            {"strategy": "local", "average_every": "log_p", "payload": "weights+state"},
            {"average_every": 2, "payload": "weights+state"},
        ),
        ({"strategy": "local", "average_every": 5}, {"average_every": 5}),
        ({"strategy": "local"}, {}),
    ],
    ids=str,
)
def test_local_steps_and_averages(settings, session):
    theirs = distributed("res", model_of("res"), P, STEPS, **APART, **session)
    assert_same(simulate("res", **settings), theirs)


@pytest.mark.parametrize("name", ["mlp", "res"])
def test_all_reduce(name):
    theirs = distributed(name, model_of(name), P, STEPS, allreduce=True, **APART)
    ranks = simulate(name, strategy="allreduce")
    assert ranks.consensus_distance() == 0
    assert_same(ranks, theirs)


@pytest.mark.parametrize(("delay", "payload"), [(2, "weights"), (3, "weights+state")])
def test_late_exchanges(delay, payload):
    """Of mode stale: as late on every link as virtual ranks have them."""
    mode = gg.Stale(max_staleness=3)
    start = model_of("mlp")
    sessions = Scripted(
        P, optimizer=sgd, make=lambda: copy.deepcopy(start), mode=mode, payload=payload
    )

    def gradients(model, rank, step):
        x, y = batches("mlp", P, step)
        model.zero_grad()
        F.cross_entropy(model(x[rank]), y[rank]).backward()

    try:
        sessions.late_by(delay, STEPS, gradients)
        theirs = [dict(model.named_parameters()) for model in sessions.models]
    finally:
        sessions.close()
    ranks = VirtualRanks(start, P, optimizer=sgd, mode=mode, payload=payload, delay=delay)
    for step in range(STEPS):
        ranks.step(*batches("mlp", P, step))
    for rank in range(P):
        for name, value in ranks.replica(rank).named_parameters():
            torch.testing.assert_close(value, theirs[rank][name], rtol=1e-4, atol=1e-5)
