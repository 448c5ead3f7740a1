"""No thread comes back from a store while the interpreter ends: torch's store aborts it then."""

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
