"""Every family: a run that is resumed equals one that is not."""

import pytest
import torch

from support.families import FAMILIES, on_ranks, train
from support.replicas import network


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def is_stale(request, family):
    return request.node.callspec.params["family"] == "gossip, stale"


def test_resume_equals_uninterrupted(family, is_stale):
    """Bit for bit, but in mode stale, where it is a matter of time what is mixed when."""
    states = {}

    def first(rank, attach):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with attach(model, optimizer) as session:
            train(model, optimizer, rank, count=5)
            states[rank] = session.state_dict()
            session.group.barrier()
            train(model, optimizer, rank, count=4)
            held = [p.detach().clone() for p in model.parameters()]
            session.group.barrier()
            return held

    def second(rank, attach):
        model = network(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        with attach(model, optimizer) as session:
            session.load_state_dict(states[rank])
            for name, p in model.named_parameters():
                assert torch.equal(p, states[rank]["model"][name])
            assert optimizer.param_groups[0]["lr"] == 0.01
            train(model, optimizer, rank, count=4)
            held = [p.detach().clone() for p in model.parameters()]
            session.group.barrier()
        return held

    uninterrupted = on_ranks(family, first)
    for mine, resumed in zip(uninterrupted, on_ranks(family, second), strict=True):
        for a, b in zip(mine, resumed, strict=True):
            assert is_stale or torch.equal(a, b)
