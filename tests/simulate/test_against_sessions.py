"""Virtual ranks compute what sessions of real ranks compute, to float tolerance."""

import sys

import pytest
import torch

import gossipgrad as gg
from gossipgrad.simulate import VirtualRanks
from gossipgrad.topology import by_name
from support.virtual import MODELS, batches, distributed, sgd

P = 4
STEPS = 7


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


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


@pytest.mark.parametrize("batching", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "res"])
def test_every_model(name, batching):
    ranks = simulate(name, batching=batching, seed=5)
    assert ranks.consensus_distance() > 1e-3
    assert_same(ranks, distributed(name, model_of(name), P, STEPS, seed=5))


@pytest.mark.parametrize("mode", ["overlap", "sync", "lagged"])
@pytest.mark.parametrize("payload", ["weights", "weights+state"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_modes_and_payloads(mode, payload, optimizer):
    settings = {"mode": mode, "payload": payload, "optimizer": optimizer}
    theirs = distributed("mlp", model_of("mlp"), P, STEPS, **settings)
    assert_same(simulate("mlp", **settings), theirs)


@pytest.mark.parametrize(
    "settings",
    [
        {"payload": gg.WeightsAndState(every=3)},
        {"wire_dtype": torch.bfloat16},
        {"wire_dtype": torch.bfloat16, "payload": "weights+state", "mode": "sync"},
        {"average_every": 3},
        {"average_every": "log_p", "payload": "weights+state"},
        {"topology": "hypercube"},
        {"topology": by_name("dissemination", P, rotate=False)},
        {"topology": by_name("complete", P, seed=2)},
    ],
    ids=str,
)
def test_settings(settings):
    theirs = distributed("mlp", model_of("mlp"), P, STEPS, **settings)
    assert_same(simulate("mlp", **settings), theirs)


@pytest.mark.parametrize("name", ["mlp", "res"])
def test_every_log_p_and_local_averages(name):
    apart = {"mode": "sync", "every": sys.maxsize}
    theirs = distributed(
        name, model_of(name), P, STEPS, average_every=2, payload="weights+state", **apart
    )
    assert_same(simulate(name, strategy="every-log-p"), theirs)
    theirs = distributed(name, model_of(name), P, STEPS, average_every=5, **apart)
    assert_same(simulate(name, strategy="local", average_every=5), theirs)
    theirs = distributed(name, model_of(name), P, STEPS, **apart)
    assert_same(simulate(name, strategy="local"), theirs)


@pytest.mark.parametrize("name", ["mlp", "lenet", "res"])
@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_all_reduce(name, batching):
    theirs = distributed(
        name, model_of(name), P, STEPS, mode="sync", every=sys.maxsize, allreduce=True
    )
    ranks = simulate(name, strategy="allreduce", batching=batching)
    assert ranks.consensus_distance() == 0
    assert_same(ranks, theirs)
    assert_same(
        simulate(
            name,
            strategy="post-local-sgd",
            post_local_after=STEPS,
            average_every=2,
            batching=batching,
        ),
        theirs,
    )
