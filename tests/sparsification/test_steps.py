"""Steps: no optimizer takes one with a gradient of its rank alone, or of other units."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import gossipgrad as gg
from support.replicas import network
from support.sparse import on_ranks, same_weights

WHOLE = {"plan": "single", "density": 1.0}


def inside_no_sync(me):
    with me.session.no_sync():
        me.backward(9)


def test_gradients_that_came_after_a_round_meet_before_the_step():
    """The mean of both passes, also where one rank left out a part of the model in the second."""

    def use(me):
        sum((me.rank + 1) * p.sum() for p in me.model.parameters()).backward()
        with me.session.no_sync():
            of = me.model.parameters() if me.rank else me.model[0].parameters()
            sum(10 * p.sum() for p in of).backward()
        me.optimizer.step()
        assert me.session.stats().rounds == 2
        return me.gradients()

    told = on_ranks(use, **WHOLE)
    assert same_weights(told)
    assert [set(g.flatten().tolist()) for g in told[0]] == [{11.5}, {11.5}, {6.5}, {6.5}]


def test_a_scaler_needs_the_last_pass_of_a_step_to_be_a_round():
    x = torch.ones(4, 6)

    def use(me):
        with me.session.no_sync():
            me.scaled_backward(x)
        me.scaled_backward(x)
        me.scaled_step()
        with me.session.no_sync():
            me.scaled_backward(x)
        with pytest.raises(gg.GossipError):
            me.scaled_step()

    on_ranks(use, scales=True, together=False, **WHOLE)


def test_a_parameter_that_was_not_trained_at_the_start_is_not_stepped_alone():
    def make():
        model = network()
        model[0].requires_grad_(False)
        return model

    def use(me):
        me.train()
        me.model[0].requires_grad_(True)
        me.backward()
        with pytest.raises(gg.ReplicaChangedError, match=r"'0\.weight'"):
            me.optimizer.step()
        me.session.broadcast_()
        me.train()
        return me.weights()

    assert same_weights(on_ranks(use, make=make, **WHOLE))


@pytest.mark.parametrize("plan", ["single", "optimal"])
def test_a_parameter_that_is_frozen_behind_the_session_is_not_stepped(plan):
    """Also where the plan is made meanwhile: in the seventh round."""

    def use(me):
        me.train(6)
        me.model[0].bias.requires_grad_(False)
        frozen = me.model[0].bias.detach().clone()
        me.backward()
        with pytest.raises(gg.ReplicaChangedError, match=r"'0\.bias'"):
            me.optimizer.step()
        me.session.broadcast_()
        me.train(2)
        assert torch.equal(me.model[0].bias, frozen)
        return me.weights()

    assert same_weights(on_ranks(use, plan, density=1.0))


@pytest.mark.parametrize(
    ("methods", "nothing"), [(("sparse",), None), (("sparse",), 0.0), (("dense",), None)]
)
def test_a_rank_without_gradients_gets_those_of_the_others_and_sends_nothing(methods, nothing):
    def use(me):
        me.train()
        kept = me.carried()
        me.optimizer.zero_grad()
        if me.rank:
            for p in me.model.parameters():
                p.grad = None if nothing is None else torch.zeros_like(p)
        else:
            me.backward()
        me.optimizer.step()
        now = me.carried()
        same = all(torch.equal(kept[name], now[name]) for name in kept)
        assert same == (me.rank == 1 or methods == ("dense",))
        assert me.session.stats().rounds == 2
        return me.weights() + me.gradients()

    told = on_ranks(use, "single", density=0.1, methods=methods)
    assert same_weights(told)
    assert any(bool(g.any()) for g in told[1][4:])


def test_what_has_not_met_when_a_closure_returns_does_so_then():
    def use(me):
        def closure():
            inside_no_sync(me)
            return 1.0

        inside_no_sync(me)
        assert me.optimizer.step(lambda: 7.0) == 7.0
        assert me.session.stats().rounds == 1
        assert me.optimizer.step(closure=closure) == 1.0
        assert me.session.stats().rounds == 2
        me.optimizer.step(closure if me.rank else lambda: me.backward(3))
        assert me.session.stats().rounds == 3
        return me.weights()

    assert same_weights(on_ranks(use, **WHOLE))


def test_a_step_that_no_scaler_saw_takes_nothing_that_is_scaled():
    """The other rank's `.grad` is to be divided by the scale, which this one has missed."""
    x = torch.ones(4, 6)

    def use(me):
        me.scaled_backward(x)
        me.scaled_step()
        me.optimizer.zero_grad()
        before = me.weights()
        if me.rank:
            with pytest.raises(gg.GossipError):
                me.optimizer.step()
            assert same_weights([before, me.weights()])
        else:
            me.scaled_backward(x)

    on_ranks(use, "single", density=0.1, scales=True, together=False)


def test_an_optimizer_state_is_made_by_a_step_that_no_scaler_saw():
    """torch.distributed.checkpoint steps with zeros and no learning rate to have one."""

    def use(me):
        me.scaled_backward(torch.ones(4, 6) + me.rank)
        me.scaled_step()
        me.optimizer.zero_grad()
        kept = me.carried()
        get_optimizer_state_dict(me.model, me.optimizer)
        now = me.carried()
        assert any(bool(each.any()) for each in kept.values())
        assert all(torch.equal(kept[name], now[name]) for name in kept)
        return me.weights()

    assert same_weights(on_ranks(use, "single", density=0.1, scales=True))


@pytest.mark.parametrize("methods", [("sparse",), ("dense",), ("bf16",)])
@pytest.mark.parametrize("kind", ["skips a step", "makes a pass more"])
def test_ranks_in_different_steps_do_not_train_on(methods, kind):
    """The round after it fails on both, before a step is taken with it."""

    def use(me):
        me.train(3)
        me.backward()
        if me.rank == 0 or kind == "makes a pass more":
            me.optimizer.step()
        with pytest.raises(gg.GossipError):  # noqa: PT012
            if me.rank == 1:
                me.backward()
            me.train(3)
        assert all(p.isfinite().all() for p in me.model.parameters())

    on_ranks(use, "single", density=0.1, methods=methods, together=False)


@pytest.mark.parametrize("methods", [("sparse",), ("dense",)])
def test_a_line_search_on_the_loss_of_one_rank_ends_the_session_and_on_their_mean_trains(methods):
    """Evaluations of unlike weights are an error on all ranks; with equal losses there are none."""

    def search(me, *, is_shared):
        x = torch.randn(50, 6, generator=torch.Generator().manual_seed(me.rank))

        def closure():
            me.optimizer.zero_grad()
            loss = (me.model(x) - x[:, :3].sin()).square().mean() * (1 + 20 * me.rank)
            loss.backward()
            return me.group.mean_(loss.detach()) if is_shared else loss

        for _ in range(4):
            me.optimizer.step(closure)
        return me.weights()

    def lbfgs(parameters, lr):
        return torch.optim.LBFGS(parameters, lr, max_iter=8, line_search_fn="strong_wolfe")

    of = {"density": 1.0 if methods == ("dense",) else 0.5, "methods": methods, "optimizer": lbfgs}
    assert same_weights(on_ranks(lambda me: search(me, is_shared=True), "single", **of))

    def alone(me):
        with pytest.raises(gg.GossipError):
            search(me, is_shared=False)

    on_ranks(alone, "single", together=False, **of)


def by_hand(me):
    for p in me.model.parameters():
        p.grad = torch.full_like(p, float(me.rank))


def test_gradients_by_hand_after_a_step_that_a_scaler_left_out_are_no_round_gone_by():
    def use(me):
        me.scaled_backward(torch.full((4, 6), float("inf")))
        me.scaled_step()
        assert me.optimizer.state_dict()["state"] == {}
        by_hand(me)
        with pytest.raises(gg.GossipError):
            me.optimizer.step()

    on_ranks(use, scales=True, together=False, **WHOLE)
