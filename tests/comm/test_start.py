"""Ranks that die, hang or are stopped while the others wait for them at the start."""

import os
import signal
import subprocess
import time

import pytest

import gossipgrad as gg
from gossipgrad.comm import AskedStore
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
    start = time.monotonic()
    with pytest.raises(gg.GossipError) as caught:
        gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=3.0)
    seconds = time.monotonic() - start
    store.set(f"out{rank}", "")
    store.wait([f"out{other}" for other in (0, 2)])  # who ends at once would be missed, too
    return str(caught.value), seconds


@pytest.mark.process
@pytest.mark.parametrize("dies_before", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_who_is_killed_at_the_start_is_named_soon(dies_before):
    """Before it has come, before it connects, and later."""
    answers = run_processes(3, enter, dies_before, may_die=(1,))
    for said, seconds in (answers[0], answers[2]):
        assert "rank 1 " in said
        assert seconds < 30


def test_the_time_to_wait_for_others_is_a_number_of_seconds():
    model = network()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="start_timeout_seconds"):
            gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=wrong)


def ask_while_stopped(rank, store):
    """Is stopped for longer than an answer is awaited, just after the question."""
    asked = AskedStore(store, timeout_seconds=1.0)

    def answer(connection):
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 2; kill -CONT {me}"])
        time.sleep(0.3)
        return connection.check(["nothing"])

    start = time.monotonic()
    found = asked.ask(answer)
    asked.close()
    return found, time.monotonic() - start


@pytest.mark.process
def test_time_in_which_this_process_was_stopped_does_not_count():
    ((found, seconds),) = run_processes(1, ask_while_stopped, grouped=False)
    assert found is False
    assert seconds > 1.8, "it was not stopped"
