"""Parameters that get other shapes in the middle of a session, on all ranks alike."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.replicas import adam, backward, flat, network, sgd
from support.sessions import run_sessions

STAYS = torch.tensor([0, 2, 3, 6, 7])  # of the eight hidden units
SHAPES = [(5, 6), (5,), (3, 5), (3,)]


@torch.no_grad()
def narrow(model, optimizer=None):
    """Three of the eight hidden units go; the first takes a quarter of each one's weights."""
    gone = torch.tensor([1, 4, 5])
    model[2].weight[:, 0] += 0.25 * model[2].weight[:, gone].sum(1)
    for parameter, dim in ((model[0].weight, 0), (model[0].bias, 0), (model[2].weight, 1)):
        parameter.grad = None
        for key, value in (optimizer.state[parameter] if optimizer else {}).items():
            if value.ndim:
                optimizer.state[parameter][key] = value.index_select(dim, STAYS)
        parameter.set_(parameter.index_select(dim, STAYS))
    model[0].out_features = model[2].in_features = 5


def message_bytes(session):
    return sum(part.size_bytes for flow in session.flows for part in flow.parts)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "settings"),
    [
        (2, sgd, {"mode": "sync"}),
        (2, adam, {"mode": "overlap", "payload": "weights+state"}),
        (3, sgd, {"mode": "overlap", "wire_dtype": torch.bfloat16}),
        (3, adam, {"mode": "sync", "local_steps": 2}),
        (2, sgd, {"mode": "stale"}),
    ],
)
def test_shapes_change_and_training_continues(world_size, optimizer, settings):
    def use(me):
        model, session = me.model, me.session
        me.train(5)
        wide_bytes = message_bytes(session)
        other = network()
        with session.consensus():
            mean = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for mine, each in zip(other.parameters(), mean, strict=True):
                mine.copy_(each)
        narrow(other)
        session.rebuild(lambda: narrow(model, me.optimizer), digest="a quarter")
        assert [tuple(p.shape) for p in model.parameters()] == SHAPES
        # The mean of the narrow replicas is the narrow mean: the change is linear.
        torch.testing.assert_close(me.mean(), flat(other), rtol=1e-5, atol=1e-6)
        assert 0 < message_bytes(session) < wide_bytes
        delivered = me.outcomes["delivered"]
        me.train(4 * world_size)
        if settings["mode"] != "stale":
            assert me.outcomes["delivered"] > delivered
        shown = me.mean()
        session.average_()
        torch.testing.assert_close(flat(model), shown, rtol=1e-6, atol=1e-6)
        return shown

    ended = run_sessions(world_size, use, optimizer=optimizer, **settings)
    assert all(torch.equal(shown, ended[0]) for shown in ended)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_ranks_that_would_make_different_changes_make_none(mode):
    def use(me):
        me.train(5)
        before = me.mean()
        with pytest.raises(gg.AgreementError, match="different changes"):
            me.session.rebuild(lambda: narrow(me.model), digest=f"of rank {me.rank}")
        assert torch.equal(me.mean(), before)
        me.train(3)
        me.session.rebuild(lambda: narrow(me.model, me.optimizer))
        me.train(3)
        return [tuple(p.shape) for p in me.model.parameters()]

    assert run_sessions(2, use, mode=mode) == [SHAPES, SHAPES]


def test_a_call_without_a_change_disturbs_nothing():
    def use(me):
        me.train(5)
        me.session.rebuild()
        me.train(5)
        return me.mean(), me.session.stats().outcomes["void"]

    (one, voids), (other, _) = run_sessions(2, use, mode="sync")
    assert voids == 0
    assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_model_changed_before_the_call_is_taken_as_it_is(mode):
    def use(me):
        me.train(5)
        narrow(me.model, me.optimizer)
        me.session.rebuild()
        me.train(5)
        return me.mean()

    one, other = run_sessions(2, use, mode=mode, gradients=backward)
    assert len(one) == sum(torch.Size(shape).numel() for shape in SHAPES)
    assert torch.equal(one, other)


def test_another_head_is_exchanged_from_then_on():
    def use(me):
        model, session = me.model, me.session
        me.train(3)

        def exchange():
            model[2] = nn.Linear(8, 4)
            nn.init.constant_(model[2].weight, me.rank)
            me.optimizer.param_groups[0]["params"] = list(model.parameters())

        session.rebuild(exchange)
        with session.consensus():
            mean = model[2].weight.mean().item()
        me.train(4)
        return mean

    assert run_sessions(2, use, mode="overlap") == [0.5, 0.5]


def test_replicas_that_differ_afterwards_are_refused_on_all_ranks():
    def use(me):
        me.train(3)
        with pytest.raises(gg.AgreementError):
            me.session.rebuild(lambda: me.rank or narrow(me.model, me.optimizer))
        return True

    assert run_sessions(2, use, mode="overlap") == [True, True]
