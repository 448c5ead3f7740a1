"""A session's begin and end when either goes wrong: nothing is left behind, nobody waits."""

import threading

import pytest

import gossipgrad as gg
from gossipgrad.comm import Membership
from support.links import ours, until_none_but
from support.ranks import run_ranks
from support.replicas import network, sgd, transport_by_name


def test_a_session_that_fails_to_begin_leaves_no_thread_and_no_hook(monkeypatch):
    def fail(driver):
        assert any(thread.name == "gossipgrad-members" for thread in threading.enumerate())
        raise KeyboardInterrupt

    monkeypatch.setattr("gossipgrad.engine._driver.StepDriver.begin", fail)  # all is begun then
    link = transport_by_name("in-process", 2)
    before = set(ours())

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with pytest.raises(KeyboardInterrupt):
            gg.gossip(model, optimizer, process_group=group, transport=link)
        return len(optimizer._optimizer_step_pre_hooks) + len(model._state_dict_pre_hooks)

    assert run_ranks(2, rank_main) == [0, 0]
    until_none_but(before)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_rank_that_was_given_up_closes_without_waiting(given_up):
    waits = []

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        session = gg.gossip(model, optimizer, process_group=group, transport=link)
        if rank == 1 and given_up:
            members = Membership.first(2).without({1: "no sign of life"}, left=False, by=0)
            session._members.watch.latest = members
        stop = session._rounds.stop
        group.barrier()

        def stop_now(wait_seconds, linger_seconds):
            if rank == 1:
                waits.append(wait_seconds)
            stop(0.0, 0.0)

        session._rounds.stop = stop_now
        session.close()

    link = transport_by_name("in-process", 2)
    run_ranks(2, rank_main)
    assert [wait > 0 for wait in waits] == [not given_up]
