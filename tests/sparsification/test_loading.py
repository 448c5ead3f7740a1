"""States that are loaded: which belong together, and what they bring with them."""

import pytest
import torch

import gossipgrad as gg
from gossipgrad.sparsification import deal_states
from support.ranks import run_ranks
from support.replicas import network
from support.sparse import backward_of


def start(group, model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"plan": "layerwise", "density": 0.2, **settings}
    return optimizer, gg.sparsify(model, optimizer, process_group=group, **settings)


def saved(steps_of=lambda rank: 3, **settings):
    """The states of two ranks, each after so many steps."""
    states = {}

    def rank_main(rank, group):
        model = network()
        optimizer, session = start(group, model, **settings)
        with session:
            for step in range(max(steps_of(0), steps_of(1)) + 1):
                if step == steps_of(rank):
                    states[rank] = session.state_dict()
                backward_of(model, rank, step)
                optimizer.step()

    run_ranks(2, rank_main)
    return [states[0], states[1]]


def test_states_of_different_steps_do_not_belong_together():
    states = saved(lambda rank: 3 + 2 * rank)

    def rank_main(rank, group):
        model = network(1)
        _, session = start(group, model)
        with session:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match="saved after 3 and 5 rounds"):
                session.load_state_dict(states[rank])
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))

    run_ranks(2, rank_main)
    with pytest.raises(ValueError, match="saved after 3 and 5 rounds"):
        deal_states(states, 3)
