"""Leases, and stores that hang or break: what a rank may do while it cannot ask."""

import logging
import threading
import time

import pytest

from gossipgrad.comm import LOST, Heartbeats, Membership, MemberWatch, Record
from gossipgrad.errors import EvictedError
from support.waiting import HANG_SECONDS, until
from support.watches import HookedStore, make_watches, pass_seconds

FIFTY = Heartbeats(interval_seconds=0.005, lease_seconds=50.0, silent_seconds=5000.0)
QUICK = Heartbeats(interval_seconds=0.01, lease_seconds=0.1, silent_seconds=5000.0)


@pytest.fixture
def store():
    return HookedStore()


@pytest.fixture
def started(clock, store):
    """Starts the watch of rank 0 of two, on the hooked store; ends it."""
    made = []

    def start(settings, **options):
        first = Membership.first(2)
        watch = MemberWatch(store, 0, first, settings, **({"now": clock} | options))
        made.append(watch)
        store.inner.set("beat/1", "0")
        watch.start()
        return watch

    yield start
    store.before = lambda what, key: None
    for watch in made:
        watch.stop()


def give_up(store, rank):
    record = Record(store)
    record.replace(known := record.read(), known.without({rank: "silent"}, left=False, by=1 - rank))


def test_a_lease_that_ran_out_is_renewed_before_anything_is_sent(clock):
    """The thread of rank 1 is stopped; the others give rank 1 up meanwhile."""
    settings = Heartbeats(interval_seconds=1.0, lease_seconds=60.0, silent_seconds=80.0)
    all_watches = make_watches(clock, 3, settings)
    pass_seconds(clock, all_watches, 3)
    paused = all_watches[1]
    pass_seconds(clock, [all_watches[0], all_watches[2]], 84)
    assert all_watches[0].latest.living == (0, 2)
    assert not paused.is_member()
    paused.start()  # goes on, but may come later than the next send
    with pytest.raises(EvictedError, match=r"rank 1 was taken for dead by rank 0 \(no sign"):
        paused.confirm()
    assert not paused.is_member()
    paused.stop()


def test_a_beat_in_which_a_rank_was_stopped_renews_no_lease(clock, store, started):
    reading, goes_on = threading.Event(), threading.Event()

    def before(what, key):
        if what == "get" and key == "beat/1":  # it has read the record
            reading.set()
            assert goes_on.wait(HANG_SECONDS)

    store.before = before
    watch = started(FIFTY)
    assert reading.wait(HANG_SECONDS)
    clock.seconds = 6000.0
    give_up(store.inner, 0)
    goes_on.set()
    with pytest.raises(EvictedError, match="rank 0 was taken for dead by rank 1"):
        watch.confirm()
    assert not watch.is_member()
    assert watch.store_lost is None


def test_a_store_that_hangs_is_awaited_for_one_lease_and_then_no_more(
    clock, store, started, caplog
):
    often = Heartbeats(interval_seconds=0.01, lease_seconds=0.2, silent_seconds=0.5)
    with caplog.at_level(logging.WARNING):
        watch, free = started(often), threading.Event()
        store.before = lambda what, key: free.wait(HANG_SECONDS)
        clock.seconds += 0.3
        began = time.monotonic()
        assert not watch.is_member(), "nothing is sent, and nobody waits"
        watch.confirm()
        assert time.monotonic() - began >= 0.2
        assert watch.store_lost
        # It is not awaited before every send: that would take hours.
        assert all(watch.confirm() and watch.is_member() for _ in range(50_000))
        free.set()
        until(lambda: watch.store_lost is None)
    assert ["the membership stays as it is" in r.message for r in caplog.records] == [True, False]


def test_a_connection_that_breaks_is_made_anew_and_what_broke_meanwhile_is_looked_at(
    clock, store, started
):
    connections = []

    def fail(what, key):
        raise RuntimeError("Connection reset by peer")

    def reconnect():
        connections.append(HookedStore(store.inner))
        if len(connections) < 3:
            connections[-1].before = fail
        return connections[-1]

    watch = started(QUICK, reconnect=reconnect, now=time.monotonic)
    store.before = fail
    until(lambda: watch.store_lost)
    watch.report_down(1, LOST)
    until(lambda: len(connections) == 3 and watch.store_lost is None)
    until(lambda: watch.latest.living == (0,))
    assert watch.latest.gone[1].why == "its link broke, and it shows no sign of life"


@pytest.mark.parametrize("seconds", [35.0, 60.0])
def test_a_store_that_is_slow_is_not_awaited_again_and_again(
    clock, store, started, caplog, seconds
):
    """The lease is 50 s. Each beat of 35 s would renew it too late, and be awaited."""
    took, beats = seconds, 0

    def before(what, key):
        nonlocal beats
        if key == "membership":
            clock.seconds += took
            beats += 1
            time.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        store.before = before
        watch = started(FIFTY)
        until(lambda: watch.store_lost)
        last = beats + 20
        until(lambda: watch.is_member() and watch.store_lost and beats > last)
        took = 0.0
        until(lambda: watch.store_lost is None)
    slow, again = (record.message for record in caplog.records)
    assert "the rendezvous store is slow" in slow
    assert "answers again" in again
