"""What gossip keeps: the sum over ranks of weights, residuals and outstanding deltas."""

import numpy as np
import pytest
import torch

import gossipgrad as gg
from support.replicas import network, plain_sgd, set_gradients
from support.sessions import no_gradients, run_sessions


def sums(world_size, dtype, rounds, mode, wire_dtype):
    """The mean over ranks before and after rounds of no updates, and of the absolute values."""

    def use(me):
        with torch.no_grad():  # replicas begin equal; pull them apart, on purpose
            for number, p in enumerate(me.model.parameters()):
                generator = torch.Generator().manual_seed(100 * me.rank + number)
                p.add_(torch.randn(p.shape, generator=generator).to(dtype))
        before = me.weights().double()
        me.train(rounds)
        return before, me.mean().double()  # counts what is outstanding in

    found = run_sessions(
        world_size,
        use,
        make=lambda rank: network(dtype=dtype),
        optimizer=plain_sgd,
        gradients=no_gradients,
        mode=mode,
        wire_dtype=wire_dtype,
        bucket_bytes=100,
        heartbeats=None,  # a lease that runs out on a busy machine would void a round
    )
    before = torch.stack([b for b, _ in found])
    return before.mean(0), found[0][1], before.abs().mean(0)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("world_size", "mode"), [(2, "overlap"), (3, "sync"), (5, "overlap"), (8, "sync")]
)
def test_mean_is_kept_in_every_mode_on_every_wire(world_size, mode, wire_dtype):
    before, after, size = sums(world_size, torch.float32, 7, mode, wire_dtype)
    assert (after - before).abs().sum() <= 2e-6 * size.sum()


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_mean_of_narrow_weights_is_kept_with_their_residuals(mode):
    before, after, _ = sums(6, torch.bfloat16, 30, mode, None)
    # The consensus is shown in bf16, so it is exact to bf16's own rounding and no more.
    assert ((after - before).abs() <= 2**-8 * before.abs() + 2**-16).all()


def test_a_round_mixes_the_snapshots_of_its_start_by_the_schedules_weight():
    """Two rounds of three steps by hand: between them weights move by their own updates alone."""
    rate, other = 0.1, 0.2
    schedule = gg.topology.from_matrix(np.array([[1 - other, other], [other, 1 - other]]))

    def use(me):
        held = [me.weights()]
        for _ in range(6):
            me.train()
            held.append(me.weights())
        return held

    def updates(rank, steps):
        model = network()
        for step in steps:
            set_gradients(model, rank, step)
            yield -rate * torch.cat([p.grad.flatten() for p in model.parameters()])

    settings = {"topology": schedule, "every": 3, "mode": "overlap", "optimizer": plain_sgd}
    seen = run_sessions(2, use, make=lambda rank: network(seed=7), **settings)
    for start in (0, 3):
        for rank, held in enumerate(seen):
            first, second, third = updates(rank, range(start, start + 3))
            apart = seen[1 - rank][start] - held[start]
            torch.testing.assert_close(held[start + 1], held[start] + first)
            torch.testing.assert_close(held[start + 2], held[start] + first + second)
            expected = held[start] + first + second + third + other * apart
            torch.testing.assert_close(held[start + 3], expected)
