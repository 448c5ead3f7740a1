"""Gossip of a shared mask's coordinates: as the reference says, and the mean is kept."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import BucketPlan
from gossipgrad.decentralized._reference_masked import MaskedReference
from gossipgrad.engine import weight_entries
from gossipgrad.topology import by_name
from support.replicas import (
    adam,
    assert_same_bits,
    backward,
    network,
    plain_sgd,
    set_gradients,
    sgd,
)
from support.sessions import no_gradients, run_sessions, train

STEPS = 14
SEED = 3
MASK = gg.SharedMask(0.25)


def coordinates(mask, seed, dtype, wire_dtype=None):
    """C_t(i) of `network()` in buckets of 100 bytes, worked out apart from the session."""
    parameters = dict(network(dtype=dtype).named_parameters())
    pieces = [p for entry in weight_entries(parameters) for p in entry.pieces(100)]
    specs = [piece.spec for piece in pieces]
    plan = BucketPlan.make(specs, bucket_bytes=100, wire_dtype=wire_dtype)

    def of(round, parameter):
        found = []
        for number, bucket in enumerate(plan.buckets):
            of_bucket = (seed + number * 0x9E3779B97F4A7C15) % 2**64
            at, begin = mask.indices(bucket.part.numel, seed=of_bucket, round=round), 0
            for index in bucket.indices:
                of_piece = at[(at >= begin) & (at < begin + specs[index].numel)] - begin
                begin += specs[index].numel
                if specs[index].name == list(parameters)[parameter]:
                    first_row, width = (pieces[index].rows or (0, 0))[0], specs[index].shape[1:]
                    found.append(of_piece + first_row * torch.Size(width).numel())
        return torch.cat(found).sort().values

    return of


def both(world_size, topology="dissemination", transport="in-process", **settings):
    """What a session and the reference hold after some steps."""
    optimizer = settings.pop("optimizer", sgd)
    gradients = settings.pop("gradients", backward)
    dtype = settings.pop("dtype", torch.float32)
    ours = train(
        world_size,
        STEPS,
        topology=topology,
        transport=transport,
        optimizer=optimizer,
        gradients=gradients,
        dtype=dtype,
        seed=SEED,
        compress=MASK,
        **settings,
    )
    models = [network(dtype=dtype) for _ in range(world_size)]
    reference = MaskedReference(
        models,
        [optimizer(list(model.parameters())) for model in models],
        by_name(topology, world_size, seed=SEED),
        coordinates(MASK, SEED, dtype, settings.get("wire_dtype")),
        **settings,
    )
    for step in range(STEPS):
        for rank, model in enumerate(models):
            gradients(model, rank, step)
        reference.step()
    return ours, reference.w


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"mode": "overlap"}),
        (5, {"mode": "sync"}),
        (5, {"topology": "matching", "optimizer": adam}),
        (5, {"topology": "ring", "optimizer": adam}),
        (4, {"wire_dtype": torch.bfloat16, "every": 2}),
        (3, {"transport": "tcp"}),
        (4, {"mode": "overlap", "dtype": torch.bfloat16, "gradients": set_gradients}),
        (4, {"mode": "sync", "dtype": torch.bfloat16, "gradients": set_gradients}),
    ],
)
def test_a_session_does_what_the_reference_says(world_size, settings):
    """Also with narrow parameters and their residuals."""
    assert_same_bits(*both(world_size, **settings))


def still(mode, world_size, rounds, compress, **settings):
    """Replicas that are apart, after rounds without updates: before, consensus, distance, stats."""

    def use(me):
        with torch.no_grad():
            for number, p in enumerate(me.model.parameters()):
                apart = torch.Generator().manual_seed(100 * me.rank + number)
                p.add_(torch.randn(p.shape, generator=apart))
        before = me.weights().double()
        me.train(rounds)
        distance, mean = me.session.consensus_distance(), me.mean().double()
        me.session.average_()
        return before, mean, me.weights().double(), distance, me.session.stats()

    settings |= {"gradients": no_gradients, "optimizer": plain_sgd}
    return run_sessions(world_size, use, mode=mode, compress=compress, **settings)


@pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_the_mean_is_kept_in_every_mode(mode, wire_dtype):
    """With what is outstanding counted in, and when it is mixed: late, at its own coordinates."""
    found = still(mode, 5, 9, MASK, wire_dtype=wire_dtype)
    before = torch.stack([each[0] for each in found])
    for _, mean, held, _, _ in found:
        for now in (mean, held):
            assert (now - before.mean(0)).abs().sum() <= 2e-6 * before.abs().sum()


def test_messages_snapshots_and_memory_shrink():
    """Messages and snapshots by the density; beside these lie the indices, eight bytes each."""
    (*_, whole), *_ = still("sync", 2, 6, None)
    (*_, masked), *_ = still("sync", 2, 6, gg.SharedMask(0.1))
    assert masked.bytes_sent == whole.bytes_sent * 9 // 83  # elements of the one bucket
    assert masked.snapshot_limit_bytes == whole.snapshot_limit_bytes * 9 // 83
    assert masked.extra_memory_bytes < whole.extra_memory_bytes / 2


def test_the_reference_keeps_its_sum_with_what_is_outstanding():
    models = [network(seed, torch.float64) for seed in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    reference = MaskedReference(
        models,
        optimizers,
        by_name("dissemination", 4),
        lambda t, i: MASK.indices(reference.w[0][i].numel(), seed=i, round=t),
    )
    kept = reference.invariant()
    for _ in range(5):
        for rank, model in enumerate(models):
            set_gradients(model, rank, 0)
        reference.step()
        reference.outstanding = reference._exchange([reference._values(r) for r in range(4)])
        for before, now in zip(kept, reference.invariant(), strict=True):
            torch.testing.assert_close(now, before)
        reference.outstanding = [None] * 4
