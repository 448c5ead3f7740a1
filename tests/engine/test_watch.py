"""Changes behind the session's back: refused by name, or made good."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.replicas import network, plain_sgd
from support.sessions import run_sessions


def after_one_step(use, world_size=2, **settings):
    def after(me):
        me.train()
        use(me)

    run_sessions(world_size, after, **settings)


def refuses(me, match):
    return pytest.raises(gg.ReplicaChangedError, match=match)


def load_another(me):
    me.model.load_state_dict(network(seed=7 + me.rank).state_dict())


def reinitialise(me):
    with torch.no_grad():
        me.model[2].bias.fill_(float(me.rank))


def load_optimizer(me):
    me.optimizer.load_state_dict(me.optimizer.state_dict())


def add_group(me):
    me.model.add_module("head", nn.Linear(3, 2))
    me.optimizer.add_param_group({"params": list(me.model.head.parameters())})


@pytest.mark.parametrize(
    ("change", "named", "settings"),
    [
        (load_another, "'0.weight' and 3 more", {}),
        (load_another, "'0.weight' and 3 more", {"mode": "sync"}),
        (reinitialise, "'2.bias'", {}),
        (reinitialise, "'2.bias'", {"compress": gg.SharedMask(0.02)}),
        (load_optimizer, "SGD", {}),
        (add_group, r"head\.weight, head\.bias", {}),
    ],
)
def test_a_change_is_refused_by_name_and_broadcast_takes_it_in(change, named, settings):
    """Of what a mask sends only a part could be compared with the weights: all is watched."""

    def use(me):
        change(me)
        held = me.weights()
        with refuses(me, named):
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


def test_a_change_can_be_accepted_and_its_residuals_are_forgotten():
    def narrow(rank):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 1000.0)
        return model

    def ramp(model, rank, step):
        model.weight.grad = torch.full_like(model.weight, 40.0 * rank if step == 0 else 0.0)

    def use(me):  # 1000 and 996 have met at 998, which bf16 does not have
        with torch.no_grad():
            me.model.weight.fill_(0.001)
        me.session.accept_changes()
        me.train()
        assert me.model.weight.item() == pytest.approx(0.001, rel=0.01)

    after_one_step(use, make=narrow, optimizer=plain_sgd, gradients=ramp, mode="sync")


def test_a_pending_change_stops_every_ranks_collective():
    """Evaluating right after loading must not take the foreign weights in unseen."""

    def use(me):
        if me.rank == 0:
            load_another(me)
        for _ in range(2):
            with refuses(me, r"on rank 0: parameter '0.weight'"):
                me.mean()
        me.session.broadcast_()
        with me.session.consensus():
            assert torch.equal(me.model[0].weight, network(seed=7)[0].weight)

    after_one_step(use)


def half_frozen(rank):
    model = network()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("way", ["swap", "replace", "unfreeze"])
def test_another_set_of_trained_parameters_is_seen_and_not_to_be_accepted(way):
    def use(me):
        model = me.model
        frozen = model[0].weight.numel() + model[0].bias.numel()
        numel = sum(p.numel() for p in model.parameters()) - frozen
        assert me.session.stats().bytes_sent == 4 * numel, "what is frozen does not travel"
        if way != "replace":
            model[0].requires_grad_(True)
            model[2].requires_grad_(way == "unfreeze")
        else:
            me.optimizer.param_groups[0]["params"][3] = model[2].bias = nn.Parameter(torch.zeros(3))
        for attempt in (me.session.accept_changes, me.optimizer.step):
            with refuses(me, "parameters"):
                attempt()
        me.session.broadcast_()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + me.rank) if p.requires_grad else None
        me.optimizer.step()
        me.session.average_()
        both = me.group.all_gather_object([p.flatten().tolist() for p in model.parameters()])
        assert both[0] == both[1]

    run_sessions(2, use, make=half_frozen)
