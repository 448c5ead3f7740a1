"""Leases, and stores that do not answer or break: what a rank may do while it cannot ask."""

import logging
import threading
import time

import pytest
import torch.distributed as dist

from gossipgrad.comm import Heartbeats, Membership, MemberWatch
from gossipgrad.comm._membership import Record
from gossipgrad.errors import EvictedError
from support.waiting import until
from support.watches import make_watches, pass_seconds


def test_a_lease_that_ran_out_is_renewed_before_anything_is_sent(clock):
    """The heartbeat thread of rank 1 stands still; the others give rank 1 up meanwhile."""
    settings = Heartbeats(interval_seconds=1.0, lease_seconds=60.0, silent_seconds=80.0)
    all_watches = make_watches(clock, 3, settings)
    pass_seconds(clock, all_watches, 3)
    paused = all_watches[1]
    pass_seconds(clock, [all_watches[0], all_watches[2]], 84)
    assert all_watches[0].latest.living == (0, 2)
    paused.start()  # goes on, but may come later than the next send
    with pytest.raises(EvictedError, match=r"rank 1 was taken for dead by rank 0 \(no sign"):
        paused.confirm()
    assert not paused.is_member()
    paused.stop()
    assert Record(paused._store, Membership.first(3)).read().gone[1].left is False


def test_without_waiting_an_old_lease_forbids_to_send_until_it_is_renewed(clock):
    """The lease is 60 s: for as long again the store may keep silent, and nobody waits for it."""
    settings = Heartbeats(interval_seconds=1.0, lease_seconds=60.0, silent_seconds=300.0)
    watch = MemberWatch(dist.HashStore(), 0, Membership.first(2), settings, now=clock)
    watch.waits = False
    clock.seconds += 65.0
    began = time.monotonic()
    assert not any(watch.is_member() for _ in range(100))
    watch.confirm()
    assert time.monotonic() - began < 30.0
    watch._store.set("beat/1", "1")
    watch.beat()
    assert watch.is_member()
    for seconds in (65.0, 59.0):
        clock.seconds += seconds
        watch.confirm()
        assert not watch.is_member()
        assert watch.frozen is None
    clock.seconds += 2.0
    watch.confirm()
    assert watch.is_member()
    assert "did not answer within 60 s" in watch.frozen


def test_what_is_heard_while_the_store_is_lost_is_looked_at_when_it_answers(watches, clock):
    """A link breaks then: as soon as it can be known, its peer is given up, not 10 s later."""
    all_watches = watches(3)
    pass_seconds(clock, all_watches, 3)
    watch = all_watches[0]
    watch._freeze("the rendezvous store is lost")
    watch.gone(2, left=False)
    watch._thaw()
    pass_seconds(clock, all_watches[:2], 4)
    assert watch.latest.living == (0, 1)
    assert watch.latest.gone[2].why == "its link broke, and it shows no sign of life"


def test_a_lease_that_cannot_be_renewed_freezes_the_membership(clock, caplog):
    class Hanging:
        def __init__(self):
            self._store, self.free = dist.HashStore(), threading.Event()
            self.free.set()

        def set(self, key, value):
            self.free.wait(100)
            self._store.set(key, value)

        def get(self, key):
            return self._store.get(key)

        def compare_set(self, key, expected, desired):
            return self._store.compare_set(key, expected, desired)

        def delete_key(self, key):
            return self._store.delete_key(key)

    store = Hanging()
    first, lease_seconds = Membership.first(2), 0.2
    often = Heartbeats(interval_seconds=0.01, lease_seconds=lease_seconds, silent_seconds=0.5)
    watch, _ = (MemberWatch(store, rank, first, often, now=clock) for rank in range(2))
    watch.start()
    store.free.clear()
    clock.seconds += 0.3
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert not watch.is_member(), "nothing is sent, and nobody waits"
        watch.confirm()
        assert watch.is_member()
        assert time.monotonic() - began >= lease_seconds
        assert "did not answer within 0.2 s" in watch.frozen
        began = time.monotonic()
        assert all(watch.confirm() and watch.is_member() for _ in range(400))
        assert time.monotonic() - began < 200 * lease_seconds, "asked once, not before every send"
        store.free.set()
        until(lambda: watch.frozen is None)
    assert ["the membership stays as it is" in r.message for r in caplog.records] == [True, False]
    watch.stop()


class Slow:
    """A store in which reading takes seconds of a clock, and until `read` is set."""

    def __init__(self, clock):
        self._store, self._clock, self.seconds = dist.HashStore(), clock, 0.0
        self.reading, self.read = threading.Event(), threading.Event()
        self.read.set()

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        answer = self._store.get(key)
        self.reading.set()
        assert self.read.wait(100)
        self._clock.seconds += self.seconds if key == "membership" else 0.0
        time.sleep(0.001)
        return answer

    def compare_set(self, key, expected, desired):
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key):
        return self._store.delete_key(key)


FIFTY = Heartbeats(interval_seconds=0.005, lease_seconds=50.0, silent_seconds=5000.0)


@pytest.mark.parametrize("seconds", [35.0, 60.0])
def test_a_store_that_is_slow_is_not_awaited_again_and_again(clock, caplog, seconds):
    """The lease is 50 s. Each beat of 35 s would renew it too late, and be awaited."""
    store = Slow(clock)
    watch, _ = (
        MemberWatch(store, rank, Membership.first(2), FIFTY, now=clock) for rank in range(2)
    )
    with caplog.at_level(logging.WARNING):
        store.seconds = seconds
        watch.start()
        until(lambda: watch.frozen)
        for beats in range(watch._beats + 1, watch._beats + 20):
            assert watch.is_member()
            until(lambda beats=beats: watch._beats >= beats)
            assert watch.frozen
        store.seconds = 0.0
        until(lambda: watch.frozen is None)
        watch.stop()
    slow, again = (record.message for record in caplog.records)
    assert f"the rendezvous store is slow (a beat took {seconds} s); the" in slow
    assert "answers again" in again


def test_a_beat_under_way_that_is_younger_than_a_lease_renews_it(clock):
    store = Slow(clock)
    first = Membership.first(2)
    watch, _ = (MemberWatch(store, rank, first, FIFTY, now=clock) for rank in range(2))
    clock.seconds = 40.0
    store.read.clear()
    beat = threading.Thread(target=watch.beat)
    beat.start()
    assert store.reading.wait(100)
    clock.seconds = 70.0
    answers = []
    asking = threading.Thread(target=lambda: answers.append(watch.confirm().generation))
    asking.start()
    store.read.set()
    for thread in (beat, asking):
        thread.join(100)
    assert (answers, watch._beats, watch.frozen) == ([0], 1, None)


def test_a_beat_in_which_a_rank_stood_still_renews_no_lease(clock):
    store = Slow(clock)
    watch, other = (
        MemberWatch(store, rank, Membership.first(2), FIFTY, now=clock) for rank in range(2)
    )
    store.read.clear()
    watch.start()
    assert store.reading.wait(100)
    clock.seconds = 6000.0
    other._give_up({0: "no sign of life"})
    store.read.set()
    with pytest.raises(EvictedError, match="rank 0 was taken for dead by rank 1"):
        watch.confirm()
    assert not watch.is_member()
    assert watch.frozen is None
    watch.stop()


def test_when_the_store_is_lost_the_membership_freezes_and_a_warning_says_so_once(caplog):
    class Lost(dict):
        broken, asked = False, 0

        def set(self, key, value):
            self.asked += 1
            if self.broken:
                raise dist.DistNetworkError("connection reset by peer\nand more")
            self[key] = value.encode()

        def get(self, key):
            return self[key]

        def compare_set(self, key, expected, desired):
            self.setdefault(key, desired.encode())
            return self[key]

        def delete_key(self, key):
            return self.pop(key, None) is not None

    store = Lost()
    quick = Heartbeats(interval_seconds=0.005, lease_seconds=0.02, silent_seconds=0.05)
    watch = MemberWatch(store, 1, Membership.first(3), quick)
    MemberWatch(store, 2, Membership.first(3), quick)
    with caplog.at_level(logging.WARNING):
        store.broken, before = True, store.asked
        watch.start()
        until(lambda: watch.frozen and store.asked > before + 3)
        assert watch.is_member()
        watch.gone(2, left=False)
        assert not watch.examine()
        watch.leave()
    assert [record.message for record in caplog.records] == [
        "rank 1: the rendezvous store is lost (connection reset by peer); the membership stays as "
        "it is (generation 0), and training goes on with whoever can be reached"
    ]
    assert watch.latest.living == (0, 1, 2)


class Failing:
    """A connection to a store; once it has failed it stays broken, as a socket does."""

    def __init__(self, store):
        self._store, self.broken = store, False

    def _do(self, what, *arguments):
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, what)(*arguments)

    def set(self, key, value):
        return self._do("set", key, value)

    def get(self, key):
        return self._do("get", key)

    def compare_set(self, key, expected, desired):
        return self._do("compare_set", key, expected, desired)

    def delete_key(self, key):
        return self._do("delete_key", key)


def test_a_connection_to_the_store_that_breaks_is_made_anew(clock, caplog):
    inner = dist.HashStore()
    quick = Heartbeats(interval_seconds=0.01, lease_seconds=0.1, silent_seconds=5.0)
    connections = []

    def reconnect():
        connections.append(Failing(inner))
        connections[-1].broken = len(connections) < 3
        return connections[-1]

    first, connection = Membership.first(2), Failing(inner)
    watch = MemberWatch(connection, 0, first, quick, reconnect=reconnect, now=clock)
    other = MemberWatch(inner, 1, first, quick)
    with caplog.at_level(logging.WARNING):
        watch.start()
        connection.broken = True
        until(lambda: len(connections) == 3 and watch.frozen is None)
    assert ["is lost" in r.message for r in caplog.records] == [True, False]
    beat = inner.get("beat/0")
    until(lambda: inner.get("beat/0") != beat)
    other.leave()
    other._give_up({1: "left"}, left=True)
    until(lambda: watch.latest.living == (0,))
    watch.stop()


def test_who_was_given_up_while_its_store_was_lost_learns_it_then():
    inner = dist.HashStore()
    quick = Heartbeats(interval_seconds=0.01, lease_seconds=0.1, silent_seconds=5.0)
    first, connection = Membership.first(2), Failing(inner)
    watch = MemberWatch(connection, 0, first, quick, reconnect=lambda: Failing(inner))
    other = MemberWatch(inner, 1, first, quick)
    connection.broken = True
    other._give_up({0: "no sign of life"})
    watch.start()
    until(lambda: not watch.is_member())
    with pytest.raises(EvictedError, match="rank 0 was taken for dead by rank 1"):
        watch.confirm()
    watch.stop()


def test_leaving_in_order_is_told_as_such(clock):
    store, first = dist.HashStore(), Membership.first(3)
    all_watches = [MemberWatch(store, rank, first, FIFTY, now=clock) for rank in range(3)]
    for watch in all_watches:
        watch.start()
    all_watches[1].leave()
    all_watches[0].ahead(1)
    until(lambda: all_watches[0].latest.generation)
    latest = all_watches[0].latest
    assert (latest.living, latest.lost, latest.gone[1].why) == ((0, 2), {}, "left")
    assert all_watches[0].expelled() == set()
    for watch in all_watches:
        watch.leave()
    until(lambda: Record(store, first).read().living == ())
