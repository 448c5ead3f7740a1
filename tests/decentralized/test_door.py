"""A session that fails to begin leaves nothing behind."""

import threading

import pytest

import gossipgrad as gg
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
