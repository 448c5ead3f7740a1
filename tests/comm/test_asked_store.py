import threading
import time

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, StoreSilentError
from support.hanging_store import Hanging
from support.waiting import until


def asking_threads():
    return [t for t in threading.enumerate() if t.name == "gossipgrad-store"]


def test_a_store_that_hangs_is_awaited_no_longer_than_asked_and_heard_when_it_answers():
    store = Hanging()
    asked = AskedStore(store, timeout_seconds=60.0)
    looks = []
    with pytest.raises(StoreSilentError, match=r"did not answer within 0\.2 s"):
        asked.ask(lambda s: s.set("a", "1"), timeout_seconds=0.2, listen=lambda: looks.append(0))
    assert looks
    start = time.monotonic()
    with pytest.raises(StoreSilentError, match="has not answered an earlier question"):
        asked.ask(lambda s: s.check(["a"]))
    assert time.monotonic() - start < 30
    store.answers.set()
    until(lambda: store.check(["a"]))

    def answers():
        try:
            return asked.ask(lambda s: s.get("a"))
        except StoreSilentError:
            return None

    until(lambda: answers() == b"1")


def test_what_is_raised_while_waiting_ends_the_wait():
    store = Hanging()
    asked = AskedStore(store, timeout_seconds=60.0)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked.ask(lambda s: s.check(["a"]), listen=interrupt)
    store.answers.set()


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


def test_its_thread_ends_with_it():
    before = len(asking_threads())
    asked = AskedStore(dist.HashStore())
    closed = AskedStore(dist.HashStore())
    assert len(asking_threads()) == before + 2
    closed.close()
    del asked
    until(lambda: len(asking_threads()) <= before)
