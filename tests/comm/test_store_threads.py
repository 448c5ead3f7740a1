"""No thread comes back from a store while the interpreter ends: torch's store aborts it then."""

import gc
import os
import threading
import weakref

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, Heartbeats, Membership, MemberWatch, _store_threads
from support.hanging_store import Hanging


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without the threads of other tests."""
    monkeypatch.setattr(_store_threads, "_ends", weakref.WeakKeyDictionary())


def test_the_end_of_a_process_ends_who_asks_a_store_and_waits_for_its_last_answer(monkeypatch):
    monkeypatch.setattr(_store_threads, "_END_SECONDS", 60.0)
    store = Hanging()
    asked = AskedStore(store)
    answer = asked.begin(lambda store: store.check(["key"]))
    watch = MemberWatch(dist.HashStore(), 0, Membership.first(1), Heartbeats())
    watch.start()
    threads = list(_store_threads._ends)
    assert [thread.name for thread in threads] == ["gossipgrad-store", "gossipgrad-members"]
    end = threading.Thread(target=_store_threads._end_all)
    end.start()
    end.join(0.1)
    assert end.is_alive(), "one of them is in a call still"
    store.answers.set()
    end.join(60)
    assert answer.result(0) is False
    assert not any(thread.is_alive() for thread in threads)


def test_a_store_that_hangs_keeps_no_process_from_its_end(monkeypatch):
    monkeypatch.setattr(_store_threads, "_END_SECONDS", 0.05)
    store = Hanging()
    asked = AskedStore(store)
    answer = asked.begin(lambda store: store.check(["key"]))
    _store_threads._end_all()
    assert not answer.done()
    store.answers.set()


def test_a_watch_that_was_stopped_is_forgotten_and_its_store_with_it():
    watch = MemberWatch(dist.HashStore(), 0, Membership.first(1), Heartbeats())
    watch.start()
    watch.stop()
    watch = weakref.ref(watch)
    gc.collect()
    assert watch() is None
    assert len(_store_threads._ends) == 0


def test_a_watch_that_nobody_holds_is_ended_all_the_same():
    watch = MemberWatch(dist.HashStore(), 0, Membership.first(1), Heartbeats())
    watch.start()
    del watch
    gc.collect()
    (thread,) = _store_threads._ends
    _store_threads._end_all()
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_ends_though_the_thread_of_its_parent_held_a_lock():
    watch = MemberWatch(dist.HashStore(), 0, Membership.first(1), Heartbeats())
    watch.start()
    with watch._changed, _store_threads._lock:
        ends, says = os.pipe()
        child = os.fork()
        if child == 0:
            fork = threading.Thread(target=_store_threads._end_all, daemon=True)
            fork.start()
            fork.join(10)
            os.write(says, b"hangs" if fork.is_alive() else b"ended")
            os._exit(0)
        os.waitpid(child, 0)
    assert os.read(ends, 5) == b"ended"
    os.close(ends)
    os.close(says)
    watch.stop()
