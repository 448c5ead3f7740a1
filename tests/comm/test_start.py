"""Ranks that die, hang or are stopped while the others wait for them at the start."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import AskedStore, _asked_store
from support.processes import run_processes
from support.replicas import network, sgd


def enter(rank, store, dies_before):
    """Calls `gossip()`; rank 1 is killed before the n-th question to the store, or never."""
    if rank == 1:
        asked, ask = 0, AskedStore.ask

        def ask_or_die(self, *arguments, **options):
            nonlocal asked
            asked += 1
            if asked == dies_before:
                os.kill(os.getpid(), signal.SIGKILL)
            return ask(self, *arguments, **options)

        AskedStore.ask = ask_or_die
    model = network()
    with pytest.raises(gg.GossipError) as caught:
        gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=3.0)
    store.set(f"out{rank}", "")
    store.wait([f"out{other}" for other in (0, 2)])  # who ends at once would be missed, too
    return str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize("dies_before", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_who_is_killed_at_the_start_is_named(dies_before):
    """Before it has come, before it connects, and later; another may be late, and named beside."""
    answers = run_processes(3, enter, dies_before, may_die=(1,))
    for said in (answers[0], answers[2]):
        assert re.search(r"ranks? ([02], )*1\b", said)


def test_the_time_to_wait_for_others_is_a_number_of_seconds():
    model = network()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="start_timeout_seconds"):
            gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=wrong)


def test_time_in_which_this_process_was_stopped_does_not_count(clock, monkeypatch):
    monkeypatch.setattr(_asked_store, "time", SimpleNamespace(monotonic=clock))
    asked = AskedStore(dist.HashStore(), timeout_seconds=1.0)

    def stopped(store):
        clock.seconds += 1000.0
        return store.check(["nothing"])

    assert asked.ask(stopped) is False
    asked.close()
