"""Mode sync with a momentum: the rule of the reference, and a mean that stays."""

import dataclasses

import pytest
import torch

import gossipgrad as gg
from gossipgrad.topology import by_name
from support.replicas import assert_same_bits, plain_sgd, set_gradients, train_reference
from support.sessions import no_gradients, run_sessions, train

MODE = gg.Sync(momentum=0.9, gain=0.4)


def compare(world_size, steps, **settings):
    """The replicas of sessions and of the reference."""
    topology, overlap = settings.pop("topology", "matching"), settings.pop("overlap", False)
    mode = dataclasses.replace(MODE, overlap=overlap)
    ours = train(world_size, steps, mode=mode, topology=topology, heartbeats=None, **settings)
    theirs = train_reference(
        world_size,
        steps,
        schedule=by_name(topology, world_size),
        mode="sync",
        momentum=MODE.momentum,
        gain=MODE.gain,
        overlap=overlap,
        **settings,
    )
    return ours, theirs.w


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"dtype": torch.float64}),
        (4, {"dtype": torch.float64, "exchanges": 2, "topology": "hypercube"}),
        (5, {"wire_dtype": torch.bfloat16, "exchanges": 2}),
        (4, {"dtype": torch.bfloat16}),
        (4, {"every": 3}),
        (2, {"overlap": True, "exchanges": 2}),
        (5, {"overlap": True, "exchanges": 2, "wire_dtype": torch.bfloat16}),
        (4, {"overlap": True, "exchanges": 3, "dtype": torch.bfloat16}),
    ],
)
def test_ten_steps_are_those_of_the_reference(world_size, settings):
    settings = {"gradients": set_gradients, **settings}
    assert_same_bits(*compare(world_size, 10, **settings))


@pytest.mark.parametrize("more", [{}, {"overlap": True, "exchanges": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_steps_are_those_of_the_reference(dtype, more):
    more = {"gradients": set_gradients, "optimizer": plain_sgd, **more}
    assert_same_bits(*compare(3, 1_000, dtype=dtype, **more))


@pytest.mark.parametrize("more", [{}, {"overlap": True, "exchanges": 2}], ids=str)
def test_averages_clear_the_corrections(more):
    ours, theirs = compare(4, 11, average_every=4, gradients=set_gradients, **more)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


def moved_by(me, steps):
    """How far steps without gradients move the weights."""
    before = me.weights()
    for _ in range(steps):
        no_gradients(me.model, me.rank, 0)
        me.optimizer.step()
    return float((me.weights() - before).abs().max())


@pytest.mark.parametrize("equalise", ["average_", "broadcast_"])
def test_equal_replicas_stay_equal(equalise):
    """No correction of before moves them apart."""

    def use(me):
        me.train(6)
        moved = moved_by(me, 1)
        getattr(me.session, equalise)()
        return moved, moved_by(me, 3)

    for before, after in run_sessions(4, use, mode=MODE, optimizer=plain_sgd):
        assert before > 0 == after


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_the_mean_stays_in_a_thousand_steps(wire_dtype, overlap):
    """Replicas come together."""

    def use(me):
        me.train(20)
        before = me.mean().double()
        moved_by(me, 1_000)
        return before, me.mean().double(), me.session.consensus_distance()

    mode = dataclasses.replace(MODE, overlap=overlap)
    settings = {"mode": mode, "exchanges": 2, "wire_dtype": wire_dtype, "optimizer": plain_sgd}
    for before, after, distance in run_sessions(5, use, heartbeats=None, **settings):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
        assert distance < (1e-5 if wire_dtype is None else 1e-2) * float(after.norm())


def test_a_rank_whose_partner_left_trains_on():
    """There are no differences; corrections decay, and the weights come to rest."""

    def use(me):
        me.train(6)
        me.session.wait()
        if me.rank == 1:
            return None
        me.train_until(lambda: me.session.membership.living == (0,))
        for _ in range(300):
            moved_by(me, 1)
        return moved_by(me, 1)

    rested, _ = run_sessions(2, use, mode=MODE, optimizer=plain_sgd, leaves_together=False)
    assert rested < 1e-6


def test_memory_is_one_more_model():
    def use(me):
        me.train(2)
        return me.session.stats().extra_memory_bytes, 4 * me.weights().numel()

    with_it, size_bytes = run_sessions(2, use, mode=MODE)[0]
    without, _ = run_sessions(2, use, mode="sync")[0]
    assert with_it - without == size_bytes
