"""Saving one of several replicas that differ: warned of once, and what does keep them all."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import gossipgrad as gg
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd, transport_by_name

LONE = r"state_dict\(\) of one replica, and replicas may differ: .* inside `with session.consensus"


def on_two_ranks(function, **settings):
    link = transport_by_name("in-process", 2)
    together = threading.Barrier(2)

    def rank_main(rank, group):
        model = gg.GossipDataParallel(network(), process_group=group, transport=link, **settings)
        optimizer = sgd(list(model.parameters()))
        with model.attach(optimizer):
            function(rank, model, lambda: step(rank, model, optimizer))
            together.wait(30)

    run_ranks(2, rank_main)


def step(rank, model, optimizer):
    set_gradients(model.module, rank, 0)
    optimizer.step()


@pytest.mark.parametrize("take", [lambda m: m.state_dict(), lambda m: m.module.state_dict()])
def test_the_replica_of_one_rank_is_warned_of_once(take):
    def save(rank, model, train):
        train()
        if rank == 0:
            take(model)
            take(model)

    with pytest.warns(UserWarning, match=LONE) as seen:
        on_two_ranks(save)
    assert len(seen) == 1


def test_copies_of_the_model_are_silent():
    def save(rank, model, train):
        train()
        for other in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
            other.state_dict()

    on_two_ranks(save)


def test_where_replicas_are_equal_there_is_no_warning():
    def save(rank, model, train):
        model.state_dict()
        train()
        with model.session.consensus():
            model.state_dict()
        model.session.average_()
        model.state_dict()
        train()
        model.session.broadcast_()
        model.state_dict()
        train()
        model.close()
        model.state_dict()

    on_two_ranks(save)
    on_two_ranks(lambda rank, model, train: (train(), model.state_dict()), average_every=1)


def test_one_rank_or_the_last_one_has_no_other_way():
    model = network()
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer):
        set_gradients(model, 0, 0)
        optimizer.step()
        model.state_dict()

    def leave(rank, model, train):
        train()
        if rank == 1:
            model.close()
            return
        while 1 not in model.session._rounds.channel.gone:
            train()
        model.state_dict()

    on_two_ranks(leave)


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


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_checkpoint_keeps_replicas_under_keys_of_their_own(tmp_path):
    """As docs/your_loop.md says."""
    first, second = run_processes(2, saved_and_loaded, str(tmp_path))
    assert first[0] == second[0], "one replica was kept for both"
    assert (first[1], second[1]) == (0.0, 1.0)
