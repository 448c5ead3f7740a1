"""What a session computes is what the reference computes, bit for bit where sums have an order."""

import random

import numpy as np
import pytest
import torch

from gossipgrad.planning import AffineCost, Method, omgs_greedy
from gossipgrad.sparsification import Warmup
from gossipgrad.sparsification._reference import merge
from support.replicas import adam, assert_same_bits, set_gradients
from support.sparse import backward_of, train, train_reference

SINGLE, LAYERWISE = [4], [1, 1, 1, 1]


def weights(reference):
    return [[p.detach() for p in model.parameters()] for model in reference.models]


def residuals(session):
    return dict(session.state_dict()["session"]["residuals"])


@pytest.mark.parametrize(
    ("plan", "groups"),
    [
        pytest.param("single", SINGLE, id="single"),
        pytest.param("layerwise", LAYERWISE, id="layerwise"),
        pytest.param("wfbp", LAYERWISE, id="wfbp"),
        pytest.param(100, [2, 2], id="100 bytes"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_plans(plan, groups, world_size):
    ours = train(world_size, 8, plan=plan, density=0.1, look=residuals)
    theirs = train_reference(world_size, 8, groups, density=0.1)
    assert_same_bits([held for held, _ in ours], weights(theirs))
    for rank, (_, carried) in enumerate(ours):
        for name, e in zip(carried, theirs.e[rank], strict=True):
            assert torch.equal(carried[name], e), name


@pytest.mark.parametrize(
    "settings",
    [
        {"density": Warmup(densities=(0.5, 0.25), steps=2, then=0.05)},
        {"density": 0.1, "value_dtype": torch.bfloat16},
        {"density": 0.1, "value_dtype": torch.float16},
    ],
    ids=lambda settings: ", ".join(f"{k} {v}" for k, v in settings.items())[:40],
)
def test_settings(settings):
    ours = train(3, 6, plan=100, optimizer=adam, **settings)
    theirs = train_reference(3, 6, [2, 2], optimizer=adam, **settings)
    assert_same_bits([held for held, _ in ours], weights(theirs))


@pytest.mark.parametrize("more", [{}, {"value_dtype": torch.bfloat16}, {"momentum": 0.9}])
def test_split_and_reduce(more):
    """With more than 8 ranks: each adds up a part of the coordinates, and selects of the sums."""
    ours = {name.replace("momentum", "momentum_correction"): value for name, value in more.items()}
    of = {"density": 0.3, "width": 101, "optimizer": plain, "backward": set_gradients}
    held = train(9, 5, plan="single", methods=("sparse",), look=residuals, **of, **ours)
    theirs = train_reference(9, 5, SINGLE, split=True, **of, **more)
    assert_same_bits([weights for weights, _ in held], weights(theirs))
    for rank, (_, unsent) in enumerate(held):
        for name, e in zip(unsent, theirs.e[rank], strict=True):
            assert torch.equal(unsent[name], e), name


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def test_all_is_sent_by_an_all_reduce_and_then_a_part():
    """Sums of two ranks have one order; momentum goes on through the change."""

    both = {"density": Warmup(densities=(1.0,), steps=3, then=0.1), "optimizer": plain}
    ours = train(2, 6, plan=100, momentum_correction=0.9, look=lambda s: s.stats(), **both)
    theirs = train_reference(2, 6, [2, 2], momentum=0.9, **both)
    assert_same_bits([held for held, _ in ours], weights(theirs))
    for _, stats in ours:
        whole, part = 83 * 4, sum(group.bytes_sent for group in stats.groups)
        assert stats.bytes_sent == 3 * whole + 3 * part


def test_momentum_correction():
    both = {"density": 0.1, "optimizer": plain}
    ours = train(2, 8, plan=100, momentum_correction=0.9, **both)
    theirs = train_reference(2, 8, [2, 2], momentum=0.9, **both)
    assert_same_bits([held for held, _ in ours], weights(theirs))


@pytest.mark.parametrize("plan", ["single", "layerwise"])
def test_each_rank_clips_before_it_adds_to_its_residual(plan):
    both = {"density": 0.1, "optimizer": plain}
    ours = train(3, 6, plan=plan, clip_norm=0.2, **both)
    theirs = train_reference(3, 6, SINGLE if plan == "single" else LAYERWISE, clip=0.2, **both)
    assert_same_bits([held for held, _ in ours], weights(theirs))
    unclipped = train(3, 6, plan=plan, **both)
    assert not torch.equal(unclipped[0][0][0], ours[0][0][0])


def test_what_is_not_finite_reaches_all_and_leaves_no_trace_in_residuals():
    """Rank 1 overflows in step 2: finite groups roll back by arithmetic, so to rounding."""

    def backward(model, rank, step):
        if rank == 1 and step == 2:
            handle = model[2].bias.register_hook(lambda grad: grad * float("inf"))
        backward_of(model, rank, step)
        if rank == 1 and step == 2:
            handle.remove()

    def skipping(parameters):
        return SkipsNonFinite(parameters, lr=0.05)

    both = {"density": 0.2, "optimizer": skipping, "backward": backward}
    for momentum in (None, 0.9):
        ours = train(3, 6, plan=100, momentum_correction=momentum, look=lambda s: s.stats(), **both)
        theirs = train_reference(3, 6, [2, 2], momentum=momentum, **both)
        for (held, stats), reference in zip(ours, weights(theirs), strict=True):
            assert stats.nonfinite_rounds == 1
            torch.testing.assert_close(held, reference, rtol=1e-5, atol=1e-6)


class SkipsNonFinite(torch.optim.SGD):
    """Skips a step as a scaler does."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if all(bool(grad.isfinite().all()) for grad in grads):
            super().step()


@pytest.mark.parametrize("seed", range(40))
def test_the_greedy_plan_is_that_of_the_paper_s_merge_rule(seed):
    draw = random.Random(seed)
    backward = [draw.expovariate(1.0) for _ in range(12)]
    sizes = [draw.choice((1, 2, 10, 40, 200)) for _ in range(12)]
    gamma = draw.uniform(0, 0.01)

    def select(elements):
        return gamma * elements * np.log2(elements)

    send = AffineCost(alpha_seconds=draw.uniform(0, 3), beta_seconds_per_byte=draw.uniform(0, 0.05))
    fast = omgs_greedy(backward, sizes, Method("sparse", select, send))
    assert [each.stop - each.start for each in fast.groups] == merge(backward, sizes, select, send)
