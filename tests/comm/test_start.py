"""Ranks that die, hang or are stopped while the others wait for them at the start."""

import os
import signal
import subprocess
import sys
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
    with pytest.raises(gg.GossipError) as caught:
        gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=3.0)
    store.set(f"out{rank}", "")
    store.wait([f"out{other}" for other in (0, 2)])  # who ends at once would be missed, too
    return str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize("dies_before", [1, 2, 3, 4])
def test_who_is_killed_at_the_start_is_named_soon(dies_before):
    """Before it has come, before it connects, and later."""
    start = time.monotonic()
    answers = run_processes(3, enter, dies_before, may_die=(1,))
    assert time.monotonic() - start < 60
    for answer in (answers[0], answers[2]):
        assert "rank 1 " in answer


def test_the_time_to_wait_for_others_is_a_number_of_seconds():
    model = network()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="start_timeout_seconds"):
            gg.gossip(model, sgd(list(model.parameters())), start_timeout_seconds=wrong)


def ask_while_stopped(rank, store):
    """Is stopped for longer than an answer is awaited, just after the question."""
    asked = AskedStore(store, timeout_seconds=2.0)

    def answer(connection):
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 4; kill -CONT {me}"])
        time.sleep(0.5)
        return connection.check(["nothing"])

    start = time.monotonic()
    found = asked.ask(answer)
    asked.close()
    return found, time.monotonic() - start


@pytest.mark.process
def test_time_in_which_this_process_was_stopped_does_not_count():
    ((found, seconds),) = run_processes(1, ask_while_stopped, grouped=False)
    assert found is False
    assert seconds > 3.5, "it was not stopped"


def leave_without_closing(rank, store):
    """What `python script.py` does that does not close its session, in a process of its own."""
    script = f"""
import torch, torch.distributed as dist, gossipgrad as gg
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", {store.port}, is_master=False)
dist.init_process_group("gloo", store=dist.PrefixStore("script", store), rank={rank}, world_size=2)
model = torch.nn.Linear(1200, 1200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gg.gossip(model, optimizer)
for _ in range(5):
    model(torch.ones(1, 1200)).sum().backward()
    optimizer.step()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90
    )
    return ended.returncode, ended.stderr


@pytest.mark.process
def test_a_script_that_just_ends_leaves_without_a_traceback():
    for code, said in run_processes(2, leave_without_closing, grouped=False):
        assert code == 0
        assert "Traceback" not in said
        assert "shutdown" not in said
