"""Local steps with an outer optimizer: the reference's arithmetic, and DiLoCo's on an average."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.decentralized._reference_local_steps import LocalStepsReference
from gossipgrad.topology import by_name
from support.replicas import adam, assert_same_bits, backward, network, set_gradients
from support.sessions import run_sessions, train

STEPS = 14


def diloco(world_size, steps, local_steps, lr, momentum, gradients=backward):
    """DiLoCo in one process: the outer weights after so many steps."""
    models = [network() for _ in range(world_size)]
    optimizers = [adam(list(model.parameters())) for model in models]
    outer = [w.detach().clone() for w in models[0].parameters()]
    nesterov = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=True)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            gradients(model, rank, step)
            optimizer.step()
        if (step + 1) % local_steps == 0:
            replicas = [list(model.parameters()) for model in models]
            with torch.no_grad():
                for w, *locals_ in zip(outer, *replicas, strict=True):
                    w.grad = sum(w - each for each in locals_) / world_size
                nesterov.step()
                for replica in replicas:
                    for w, new in zip(replica, outer, strict=True):
                        w.copy_(new)
    return outer


def reference(world_size, steps, topology="matching", dtype=torch.float32, **settings):
    models = [network(dtype=dtype) for _ in range(world_size)]
    optimizers = [adam(list(model.parameters())) for model in models]
    schedule = by_name(topology, world_size)
    one = LocalStepsReference(models, optimizers, schedule, **settings)
    one.models = models
    for step in range(steps):
        for rank, model in enumerate(models):
            backward(model, rank, step) if dtype.itemsize == 4 else set_gradients(model, rank, step)
        one.step()
    return one


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (5, {"mode": "sync"}),
        (5, {"mode": "overlap"}),
        (4, {"mode": "sync", "topology": "hypercube", "exchanges": 2}),
        (3, {"mode": "overlap", "wire_dtype": torch.bfloat16}),
        (3, {"mode": "sync", "dtype": torch.bfloat16}),
    ],
)
def test_session_is_the_reference_bit_for_bit(world_size, settings):
    ours = train(
        world_size,
        STEPS,
        optimizer=adam,
        gradients=backward if "dtype" not in settings else set_gradients,
        local_steps=4,
        outer=gg.Nesterov(lr=0.5, momentum=0.8),
        **settings,
    )
    theirs = reference(world_size, STEPS, local_steps=4, lr=0.5, momentum=0.8, **settings)
    assert_same_bits(ours, theirs.w)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_mean_over_ranks_follows_dilocos_recursion(mode):
    """Whatever the partners: gradients that do not depend on weights show it."""
    outer = gg.Nesterov(lr=0.7, momentum=0.9)

    def use(me):
        me.train(12)
        return me.mean()

    means = run_sessions(5, use, mode=mode, local_steps=3, outer=outer, optimizer=adam)
    theirs = diloco(5, 12, 3, lr=0.7, momentum=0.9, gradients=set_gradients)
    expected = torch.cat([w.flatten() for w in theirs])
    torch.testing.assert_close(means[0], expected, rtol=1e-5, atol=1e-5)


def test_stale_keeps_the_mean():
    """Late parts move outer weights as they move local ones, in the middle of periods, too."""

    def use(me):
        me.train(30)
        return me.mean()

    mean, *_ = run_sessions(4, use, mode="stale", local_steps=3, optimizer=adam)
    theirs = diloco(4, 30, 3, lr=0.7, momentum=0.9, gradients=set_gradients)
    expected = torch.cat([w.flatten() for w in theirs])
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"outer": gg.Nesterov()},
        {"local_steps": 0},
        {"local_steps": 2.5},
        {"local_steps": 4, "every": 2},
        {"local_steps": 4, "payload": "gradients+weights"},
        {"local_steps": 4, "outer": "nesterov"},
    ],
)
def test_what_does_not_go_together_is_refused(settings):
    model = network()
    with pytest.raises(ValueError, match=r"local_steps|outer"):
        gg.gossip(model, adam(list(model.parameters())), **settings)


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"lr": float("nan")}, {"momentum": 1.0}])
def test_an_outer_optimizer_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="outer optimizer"):
        gg.Nesterov(**wrong)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_an_average_within_a_period_is_not_taken_for_local_steps(mode):
    settings = {"mode": mode, "average_every": 6, "local_steps": 4}
    ours = train(4, STEPS, optimizer=adam, **settings)
    theirs = reference(4, STEPS, **settings)
    for mine, other in zip(ours, theirs.w, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=2e-5, atol=2e-6)
