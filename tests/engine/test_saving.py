"""Saving one of several replicas that differ: warned of once, and what does keep them all."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

from support.processes import run_processes
from support.sessions import run_sessions

SGD = partial(torch.optim.SGD, lr=0.1)


def on_two_ranks(use, **settings):
    run_sessions(2, use, optimizer=SGD, **settings)


def test_the_replica_of_one_rank_is_warned_of_once():
    def save(me):
        me.train()
        if me.rank == 0:
            me.model.state_dict()
            me.model.state_dict()

    with pytest.warns(UserWarning, match=r"(?s)replicas may differ.*session\.consensus") as seen:
        on_two_ranks(save)
    assert len(seen) == 1


def test_copies_of_the_model_belong_to_no_session():
    def use(me):
        copies = copy.deepcopy(me.model), pickle.loads(pickle.dumps(me.model))
        me.train()
        for other in (*copies, copy.deepcopy(me.model)):
            other.state_dict()
            other(torch.ones(1, 6))

    on_two_ranks(use, mode="sync")


def saved_and_loaded(rank, store, folder):
    """What each rank gets back: saved under one key, and under a key of its own."""
    plain, own = (
        {"w": torch.full((2,), float(rank))},
        {f"rank{rank}.w": torch.full((2,), 1.0 * rank)},
    )
    dcp.save(plain, checkpoint_id=f"{folder}/plain")
    dcp.save(own, checkpoint_id=f"{folder}/own")
    for state, name in ((plain, "plain"), (own, "own")):
        for tensor in state.values():
            tensor.fill_(-1)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
    return [tensor[0].item() for state in (plain, own) for tensor in state.values()]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_checkpoint_keeps_replicas_under_keys_of_their_own(tmp_path):
    """As docs/your_loop.md says."""
    first, second = run_processes(2, saved_and_loaded, str(tmp_path))
    assert first[0] == second[0], "one replica was kept for both"
    assert (first[1], second[1]) == (0.0, 1.0)
