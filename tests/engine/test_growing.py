"""A plan that grows in the middle of a session."""

import pytest
import torch
from torch import nn

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
