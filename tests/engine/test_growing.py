"""A plan that grows in the middle of a session, and how large messages may become."""

import pytest
import torch
from torch import nn

from gossipgrad.errors import GossipError
from support.replicas import set_gradients, sgd
from support.sessions import run_sessions


def frozen(rank):
    model = nn.Sequential(nn.Linear(3, 2), nn.Module())
    model[1].body = nn.Parameter(torch.ones(2, 1 << 14), requires_grad=False)
    return model


def gradients(model, rank, step):
    set_gradients(model[0], rank, step)
    if model[1].body.requires_grad:
        model[1].body.grad = torch.full_like(model[1].body, 1.0 + rank)


def on_two_ranks(change, **settings):
    def use(me):
        me.train()
        change(me)

    def first_layer(parameters):
        return sgd([p for p in parameters if p.requires_grad])

    settings |= {"make": frozen, "optimizer": first_layer, "gradients": gradients}
    run_sessions(2, use, transport="tcp", bucket_bytes=1 << 10, **settings)


@pytest.mark.parametrize("payload", ["weights", "weights+state"])
def test_a_body_that_is_unfrozen_has_room_on_the_links(payload):
    """Its rows are 64 times as large as a bucket, and are not cut."""

    def change(me):
        me.model[1].body.requires_grad_(True)
        me.optimizer.add_param_group({"params": [me.model[1].body]})
        me.session.broadcast_()
        me.train(3)
        assert me.outcomes["delivered"] >= 3
        me.session.average_()
        bodies = me.group.all_gather_object(me.model[1].body[:, :2].tolist())
        assert bodies[0] == bodies[1]

    on_two_ranks(change, payload=payload)


@pytest.mark.parametrize("payload", ["weights", "gradients+weights"])
def test_a_plan_that_links_do_not_foresee_is_refused_before_anything_changes(payload):
    def change(me):
        larger = nn.Parameter(torch.ones(1, 1 << 17))
        me.optimizer.add_param_group({"params": [larger]})
        with pytest.raises(GossipError, match=r"message of 524288 bytes .* foresee 262144: they"):
            me.session.broadcast_()
        me.optimizer.param_groups.pop()
        before = me.outcomes["delivered"]
        me.train(3)
        assert me.outcomes["delivered"] >= before + 2
        me.session.average_()

    on_two_ranks(change, payload=payload)
