"""Parameters that shrink in the middle of a session, on all ranks alike."""

import pytest
import torch

import gossipgrad as gg
from support.replicas import adam, flat, network, sgd
from support.sessions import run_sessions

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


def consensus_of(session):
    with session.consensus():
        return [p.detach().clone() for p in session.replica.model.parameters()]


@pytest.mark.parametrize(
    ("world_size", "optimizer", "mode"),
    [(2, sgd, "sync"), (2, adam, "overlap"), (3, sgd, "overlap"), (3, adam, "sync")],
)
def test_shapes_change_and_training_goes_on(world_size, optimizer, mode):
    def use(me):
        me.train(5)
        model, held, session, train = me.model, me.optimizer, me.session, me.train
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

    ended = run_sessions(world_size, use, optimizer=optimizer, mode=mode)
    for version, shown in ended:
        assert version == 1
        assert torch.equal(shown, ended[0][1])


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_surgery_that_does_not_fit_changes_nothing(mode):
    def use(me):
        me.train(5)
        session, train = me.session, me.train
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

    assert run_sessions(2, use, mode=mode) == [0, 0]


def test_factors_of_optimizer_state_shrink_and_what_cannot_is_refused():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with gg.gossip(model, optimizer) as session:
        state = optimizer.state[model[0].weight]
        state["square"] = torch.ones(8, 8)
        with pytest.raises(ValueError, match="square"):
            session.apply_(narrower())
        assert [len(p) for p in model.parameters()] == [8, 8, 3, 3]
        del state["square"]
        session.apply_(narrower())
        assert state["row_var"].shape == (5, 1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
