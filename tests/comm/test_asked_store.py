import atexit
import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, StoreSilentError
from support.hanging_store import Hanging
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until


def test_a_store_that_hangs_is_awaited_no_longer_than_asked_and_heard_when_it_answers():
    store = Hanging()
    asked = AskedStore(store, timeout_seconds=NEVER_SECONDS)

    def listen():
        raise LookupError

    with pytest.raises(LookupError):
        asked.ask(lambda s: s.set("a", "1"), listen=listen)
    with pytest.raises(StoreSilentError, match=r"did not answer within 0\.2 s"):
        asked.ask(lambda s: s.get("a"), timeout_seconds=0.2)
    with pytest.raises(StoreSilentError, match="has not answered an earlier question"):
        asked.ask(lambda s: s.check(["a"]))
    store.answers.set()
    until(lambda: store.check(["a"]))

    def answers():
        try:
            return asked.ask(lambda s: s.get("a"))
        except StoreSilentError:
            return None

    until(lambda: answers() == b"1")


def test_errors_are_those_of_the_store_and_it_is_asked_over_a_new_connection_then():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asked = AskedStore(store)
    asked.ask(lambda s: s.set("a", "1"))
    connections = [asked.ask(lambda s: s) for _ in range(2)]
    assert connections[0] is connections[1] is not store

    def fail(s):
        raise dist.DistNetworkError("connection reset")

    with pytest.raises(dist.DistNetworkError, match="connection reset"):
        asked.ask(fail)
    assert asked.ask(lambda s: s) is not connections[0]
    assert asked.ask(lambda s: s.get("a")) == b"1"


def test_a_question_after_the_end_is_an_error_at_once():
    asked = AskedStore(dist.HashStore())
    asked.close()
    with pytest.raises(StoreSilentError, match="closed"):
        asked.begin(lambda store: store.check(["a"])).result(60.0)


SCRIPT = """
import sys, threading, time, torch.distributed as dist
from gossipgrad.comm import AskedStore, Heartbeats, Membership, MemberWatch
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = MemberWatch(store.clone(), 0, Membership.first(1), Heartbeats(interval_seconds=0.001))
watch.start()
asked = AskedStore(store)
busy = [asked.begin(lambda store: store.check(["a"])) for _ in range(100)]
if sys.argv[1] == "hangs":
    asked.begin(lambda store: time.sleep(10_000))
del watch, store
"""


@pytest.mark.process
@pytest.mark.parametrize("store", [pytest.param("answers", marks=pytest.mark.slow), "hangs"])
def test_a_process_that_ends_while_its_threads_ask_a_store_ends_well(store):
    """Torch's store aborts a process that ends while a thread comes back from it."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, store], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_ends_though_the_threads_of_its_parent_ask_a_store():
    asked = AskedStore(Hanging())
    asked.begin(lambda store: store.check(["a"]))
    child = os.fork()
    if child == 0:
        threading.Timer(HANG_SECONDS, os._exit, [1]).start()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
