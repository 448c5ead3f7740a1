"""A plan that grows in the middle of a session, and how large messages may become."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.errors import GossipError
from support.ranks import run_ranks
from support.replicas import set_gradients, sgd


def on_two_ranks(change, transport, **options):
    def rank_main(rank, group):
        model = nn.Sequential(nn.Linear(3, 2), nn.Module())
        model[1].body = nn.Parameter(torch.ones(2, 1 << 14), requires_grad=False)
        optimizer = sgd([*model[0].parameters()])

        def step(number):
            set_gradients(model[0], rank, number)
            if model[1].body.requires_grad:
                model[1].body.grad = torch.full_like(model[1].body, 1.0 + rank)
            optimizer.step()

        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=transport,
            bucket_bytes=1 << 10,
            **options,
        ) as session:
            step(0)
            change(rank, model, optimizer, session, step)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("payload", ["weights", "weights+state"])
def test_a_body_that_is_unfrozen_has_room_on_the_links(payload):
    """Its rows are 64 times as large as a bucket, and are not cut."""

    def change(rank, model, optimizer, session, step):
        model[1].body.requires_grad_(True)
        optimizer.add_param_group({"params": [model[1].body]})
        session.broadcast_()
        for number in range(1, 4):
            step(number)
        assert session.stats().outcomes["delivered"] >= 3
        session.average_()
        bodies = session.group.all_gather_object(model[1].body[:, :2].tolist())
        assert bodies[0] == bodies[1]

    on_two_ranks(change, "tcp", payload=payload)


@pytest.mark.parametrize("payload", ["weights", "gradients+weights"])
def test_a_plan_that_links_do_not_foresee_is_refused_before_anything_changes(payload):
    def change(rank, model, optimizer, session, step):
        larger = nn.Parameter(torch.ones(1, 1 << 17))
        optimizer.add_param_group({"params": [larger]})
        with pytest.raises(GossipError, match=r"message of 524288 bytes .* foresee 262144: they"):
            session.broadcast_()
        optimizer.param_groups.pop()
        before = session.stats().outcomes["delivered"]
        for number in range(1, 4):
            step(number)
        assert session.stats().outcomes["delivered"] >= before + 2
        session.average_()

    on_two_ranks(change, "tcp", payload=payload)
