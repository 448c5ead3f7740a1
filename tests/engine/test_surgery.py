"""Parameters that shrink in the middle of a session, on all ranks alike."""

import pytest
import torch

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import adam, backward, flat, network, sgd, transport_by_name

STAYS = torch.tensor([0, 2, 3, 6, 7])  # of the eight hidden units
FOLD = 0.25 * torch.ones(5, 3)
SHAPES = [(5, 6), (5,), (3, 5), (3,)]


def narrower():
    """Three of the eight hidden units go; those that stay take part of their outgoing weights."""
    return gg.Surgery(
        {
            "0.weight": [gg.Resize(0, STAYS)],
            "0.bias": [gg.Resize(0, STAYS)],
            "2.weight": [gg.Resize(1, STAYS, weight_fold=FOLD, gradient_fold=FOLD)],
        },
        {"0": {"out_features": 5}, "2": {"in_features": 5}},
    )


def after_steps(world_size, use, *, optimizer=sgd, steps=5, **settings):
    """What `use(rank, session, train)` returns on each rank, after some steps."""
    link = transport_by_name("in-process", world_size)

    def rank_main(rank, group):
        model = network()
        made = optimizer(list(model.parameters()))
        number = 0

        def train(count):
            nonlocal number
            for _ in range(count):
                backward(model, rank, number)
                made.step()
                number += 1

        with gg.gossip(model, made, process_group=group, transport=link, **settings) as session:
            train(steps)
            result = use(rank, session, train)
            group.barrier()
        return result

    return run_ranks(world_size, rank_main)


def consensus_of(session):
    with session.consensus():
        return [p.detach().clone() for p in session.replica.model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_shapes_change_and_training_goes_on(world_size, optimizer, mode):
    def use(rank, session, train):
        model, (held,) = session.replica.model, session.replica.optimizers
        ids, sent = [id(p) for p in model.parameters()], session.stats().bytes_sent
        train(2 * world_size)
        large_bytes = session.stats().bytes_sent - sent
        average = [p.clone() for p in consensus_of(session)]
        session.apply_(narrower())
        assert [tuple(p.shape) for p in model.parameters()] == SHAPES
        assert [id(p) for p in model.parameters()] == ids
        for parameter, state in held.state.items():
            assert all(v.shape == parameter.shape for v in state.values() if v.ndim)
        # The average of the narrow replicas is the narrow average: surgery is linear.
        other = network()
        with torch.no_grad():
            for mine, mean in zip(other.parameters(), average, strict=True):
                mine.copy_(mean)
        with gg.gossip(other, sgd(list(other.parameters()))) as alone:
            alone.apply_(narrower())
        torch.testing.assert_close(
            torch.cat([p.flatten() for p in consensus_of(session)]),
            flat(other),
            rtol=1e-5,
            atol=1e-6,
        )
        sent, mixed = session.stats().bytes_sent, session.stats().outcomes["delivered"]
        train(2 * world_size)
        assert 0 < session.stats().bytes_sent - sent < large_bytes
        assert session.stats().outcomes["delivered"] > mixed
        with session.consensus():
            shown = flat(model)
        session.average_()
        torch.testing.assert_close(flat(model), shown, rtol=1e-6, atol=1e-6)
        return session.replica.version, shown

    ended = after_steps(world_size, use, optimizer=optimizer, mode=mode)
    for version, shown in ended:
        assert version == 1
        assert torch.equal(shown, ended[0][1])


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_surgery_that_does_not_fit_changes_nothing(mode):
    def use(rank, session, train):
        before = flat(session.replica.model)
        for wrong in (
            gg.Surgery({"9.weight": [gg.Resize(0, STAYS)]}),
            gg.Surgery({"2.weight": [gg.Resize(0, STAYS)]}),
            gg.Surgery({"0.bias": [gg.Resize(0, STAYS)]}, {"9": {"out_features": 5}}),
        ):
            with pytest.raises(ValueError, match="surgery"):
                session.apply_(wrong)
        assert torch.equal(flat(session.replica.model), before)
        assert session.replica.version == 0
        train(3)
        session.apply_(narrower())
        train(3)
        return session.stats().outcomes["void"]

    assert after_steps(2, use, mode=mode) == [0, 0]
