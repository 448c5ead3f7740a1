"""Gossip of a shared mask's coordinates: as the reference says, and the mean is kept."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import BucketPlan
from gossipgrad.decentralized._reference_masked import MaskedReference
from gossipgrad.engine import weight_entries
from gossipgrad.topology import by_name
from support.ranks import run_ranks
from support.replicas import (
    adam,
    assert_same_bits,
    backward,
    flat,
    network,
    set_gradients,
    sgd,
    train,
    transport_by_name,
)

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


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_session_does_what_the_reference_says(world_size, mode):
    assert_same_bits(*both(world_size, mode=mode))


@pytest.mark.parametrize("topology", ["matching", "ring"])
def test_under_every_kind_of_schedule(topology):
    assert_same_bits(*both(5, topology, optimizer=adam))


def test_on_a_narrow_wire_in_rounds_of_several_steps():
    assert_same_bits(*both(4, wire_dtype=torch.bfloat16, every=2))


def test_over_zeromq():
    assert_same_bits(*both(3, transport="zeromq"))


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_narrow_parameters_with_their_residuals(mode):
    assert_same_bits(*both(4, mode=mode, dtype=torch.bfloat16, gradients=set_gradients))


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


def still(mode, world_size, rounds, compress, **settings):
    """Replicas that are apart, after rounds without updates: before, consensus, distance, stats."""
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=link,
            mode=mode,
            compress=compress,
            **settings,
        ) as session:
            with torch.no_grad():
                for place, p in enumerate(model.parameters()):
                    apart = torch.Generator().manual_seed(100 * rank + place)
                    p.add_(torch.randn(p.shape, generator=apart))
            session.accept_changes()
            before = flat(model).double()
            for _ in range(rounds):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
            distance = session.consensus_distance()
            with session.consensus():
                mean = flat(model).double()
            session.average_()
            held = flat(model).double()
            stats = session.stats()
            group.barrier()
        return before, mean, held, distance, stats

    return run_ranks(world_size, rank_main)


@pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_the_mean_is_kept_in_every_mode(mode, wire_dtype):
    """With what is outstanding counted in, and when it is mixed: late, at its own coordinates."""
    found = still(mode, 5, 9, MASK, wire_dtype=wire_dtype)
    before = torch.stack([each[0] for each in found])
    for _, mean, held, _, _ in found:
        for now in (mean, held):
            assert (now - before.mean(0)).abs().sum() <= 2e-6 * before.abs().sum()


def test_replicas_meet_more_slowly_by_the_density():
    """A round takes away `density` of what one of all weights does: 20 rounds here are as 2."""
    (_, _, _, whole, _), *_ = still("sync", 8, 2, None)
    (_, _, _, masked, _), *_ = still("sync", 8, 20, gg.SharedMask(0.1))
    assert masked == pytest.approx(whole, rel=0.35)


def test_messages_snapshots_and_memory_shrink():
    """Messages and snapshots by the density; beside these lie the indices, eight bytes each."""
    (*_, whole), *_ = still("sync", 2, 6, None)
    (*_, masked), *_ = still("sync", 2, 6, gg.SharedMask(0.1))
    assert masked.bytes_sent == whole.bytes_sent * 9 // 83  # elements of the one bucket
    assert masked.snapshot_limit_bytes == whole.snapshot_limit_bytes * 9 // 83
    assert masked.extra_memory_bytes < whole.extra_memory_bytes / 2


def test_a_change_where_nothing_is_sent_is_noticed():
    """Of what travels only a part could be compared with the weights."""

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model, optimizer, process_group=group, transport=link, compress=gg.SharedMask(0.02)
        ) as session:
            with torch.no_grad():
                model[0].bias.add_(1.0)
            if rank == 0:
                with pytest.raises(gg.ReplicaChangedError):
                    optimizer.step()
            session.accept_changes()
            group.barrier()

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"payload": "weights+state"}, r"(?s)moments.*Use payload='weights'"),
        ({"payload": "gradients"}, r"error feedback. Use payload='weights'"),
        ({"seed": -1}, r"from 0 to 2\*\*64 - 1, got -1"),
        ({"compress": "top-k:0.1"}, r"gg.SharedMask"),
        ({"compress": "shared-mask"}, r"such as 'shared-mask:0.1'"),
        ({"compress": "random:0.1"}, r"got 'random:0.1'"),
        ({"compress": "shared-mask:2"}, r"density"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, why):
    model = network()
    with pytest.raises(ValueError, match=why):
        gg.gossip(
            model, sgd(list(model.parameters())), **{"compress": "shared-mask:0.1", **settings}
        )


def test_ranks_must_agree_on_mask_and_seed():
    def rank_main(rank, group):
        model = network()
        with pytest.raises(gg.AgreementError, match=r"setting 'seed' is 1 on rank 1"):
            gg.gossip(
                model,
                sgd(list(model.parameters())),
                process_group=group,
                topology="ring",
                compress=MASK,
                seed=rank,
                transport=link,
            )

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)
