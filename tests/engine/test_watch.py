"""Changes behind the session's back: refused by name, or made good."""

import warnings

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.replicas import network
from support.sessions import run_sessions


def after_one_step(use, world_size=2, **settings):
    def after(me):
        me.train()
        use(me)

    run_sessions(world_size, after, **settings)


def refuses(me, match):
    return pytest.raises(gg.ReplicaChangedError, match=match)


def load_optimizer(me):
    me.optimizer.load_state_dict(me.optimizer.state_dict())


@pytest.mark.parametrize("settings", [{}, {"mode": "sync"}, {"compress": gg.SharedMask(0.5)}])
def test_a_loaded_optimizer_is_refused_by_name_and_broadcast_takes_it_in(settings):
    def use(me):
        load_optimizer(me)
        held = me.weights()
        with refuses(me, "SGD"):
            me.train()
        me.session.broadcast_()
        if me.rank == 0:
            assert torch.equal(me.weights(), held)
        me.train(4)
        assert me.session.consensus_distance() > 0
        me.session.average_()
        both = me.group.all_gather_object(me.weights().tolist())
        assert both[0] == both[1]

    after_one_step(use, **settings)


@pytest.mark.parametrize("mode", ["overlap", "sync", "stale"])
def test_weights_that_are_written_reach_the_others_like_an_update(mode):
    def make(rank):
        return nn.Linear(1, 1, bias=False)

    def still(model, rank, step):
        model.weight.grad = torch.zeros_like(model.weight)

    def use(me):
        with torch.no_grad():
            me.model.weight.fill_(float(me.rank))
        # In stale a rank jumps to the other's round: one that has not written yet could mix what
        # the other has sent since, and write over it, which only the other has counted.
        me.group.barrier()
        me.train(20)
        assert me.mean().item() == pytest.approx(0.5)

    after_one_step(use, make=make, gradients=still, mode=mode)


@pytest.mark.parametrize("is_made_good", [False, True])
def test_a_model_that_is_loaded_on_some_ranks_is_warned_of(is_made_good):
    def use(me):
        if me.rank == 0:
            me.model.load_state_dict(network(seed=7).state_dict())
        if is_made_good:
            me.session.broadcast_()
            with me.session.consensus():
                assert torch.equal(me.model[0].weight, network(seed=7)[0].weight)
        me.train()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        after_one_step(use)
    named = [each for each in seen if "session.broadcast_" in str(each.message)]
    assert len(named) == (not is_made_good)


def test_a_loaded_optimizer_stops_every_ranks_collective():
    def use(me):
        if me.rank == 0:
            load_optimizer(me)
        for _ in range(2):
            with refuses(me, r"on rank 0: SGD"):
                me.mean()
        me.session.broadcast_()
        me.mean()

    after_one_step(use)


def half_frozen(rank):
    model = network()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("way", ["swap", "replace", "unfreeze"])
def test_another_set_of_trained_parameters_is_exchanged_from_the_next_step_on(way):
    def use(me):
        model = me.model
        frozen = model[0].weight.numel() + model[0].bias.numel()
        numel = sum(p.numel() for p in model.parameters()) - frozen
        parts = [part.numel for flow in me.session.flows for part in flow.parts]
        assert sum(parts) == numel, "what is frozen does not travel"
        if way != "replace":
            model[0].requires_grad_(True)
            model[2].requires_grad_(way == "unfreeze")
        else:
            me.optimizer.param_groups[0]["params"][3] = model[2].bias = nn.Parameter(torch.zeros(3))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + me.rank) if p.requires_grad else None
        me.optimizer.step()
        me.session.average_()
        both = me.group.all_gather_object([p.flatten().tolist() for p in model.parameters()])
        assert both[0] == both[1]

    run_sessions(2, use, make=half_frozen)
