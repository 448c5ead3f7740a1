"""Training while the rendezvous store is lost, or stands still."""

import logging
import threading
import time
from functools import partial

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import AskedStore, Group
from gossipgrad.engine import _members
from support.deaths import run_mortals
from support.hanging_store import Hanging
from support.replicas import network, sgd
from support.waiting import until


def test_training_goes_on_when_the_store_is_lost(caplog):
    def main(me):
        me.train(3)
        me.session.group.barrier()
        watch = me.session._members.watch

        def fail(*_):
            raise RuntimeError("Connection reset by peer")

        asked = ("set", "get", "compare_set", "delete_key")
        watch._store = type("Lost", (), dict.fromkeys(asked, fail))()
        watch._reconnect = fail
        until(lambda: watch.frozen, 60.0)
        delivered = me.session.stats().outcomes["delivered"]
        me.train(10)
        assert me.session.stats().outcomes["delivered"] > delivered + 4
        assert me.session.membership.generation == 0
        mean = me.mean()
        me.session.group.barrier()
        if me.rank == 1:
            me.die()
        me.train_until(lambda: me.session._rounds.channel.gone)
        me.train(10)
        with (
            pytest.raises(gg.GossipError, match="a rank has died, left or broken it off"),
            me.session.consensus(),
        ):
            pass
        me.train(2)
        assert me.session.unreachable.keys() == {1}
        assert "its link broke, and the rendezvous store is lost" in me.session.unreachable[1]
        if me.rank == 0:
            me.train_until(lambda: me.session.departed == {1, 2})
            assert me.session.unreachable.keys() == {1}, "rank 2 has left"
        return mean

    with caplog.at_level(logging.WARNING, "gossipgrad.comm._member_watch"):
        first, _, third = run_mortals(3, main)
    assert torch.equal(first, third)
    frozen = [r.message for r in caplog.records if "the rendezvous store is lost" in r.message]
    assert len(frozen) == 3


def test_a_store_that_stands_still_does_not_hold_a_rank_up_as_it_starts(monkeypatch):
    monkeypatch.setattr(_members, "AskedStore", partial(AskedStore, timeout_seconds=0.2))
    model, store = network(), Hanging()
    optimizer = sgd(list(model.parameters()))
    # A group that has come about before, as far as it is asked here.
    group = Group(store, 0, 2, members=(0,))
    try:
        with pytest.raises(
            gg.GossipError,
            match=r"^rank 0 cannot reach the rendezvous store any more, .*not answer within 0\.2 s",
        ):
            gg.gossip(model, optimizer, process_group=group, topology="matching")
    finally:
        store.answers.set()


def test_in_mode_stale_no_step_waits_for_a_store_that_stands_still():
    free, together = threading.Event(), threading.Barrier(2)

    def main(me):
        me.train(3)
        watch = me.session._members.watch
        store, standing = watch._store, threading.Event()

        class StandingStill:
            def set(self, key, value):
                standing.set()
                assert free.wait(60)
                store.set(key, value)

            def get(self, key):
                return store.get(key)

            def compare_set(self, key, expected, desired):
                return store.compare_set(key, expected, desired)

            def delete_key(self, key):
                return store.delete_key(key)

        now = watch._confirmed_seconds
        watch._now = lambda: now
        watch._store = StandingStill()
        assert standing.wait(60)
        now = watch._confirmed_seconds + beats.lease_seconds + 1.0
        sent = me.session._rounds.channel.bytes_sent
        longest, voided = 0.0, me.session.stats().void_rounds
        for _ in range(5):
            start = time.monotonic()
            me.train(1)
            longest = max(longest, time.monotonic() - start)
        assert watch.frozen is None
        assert me.session._rounds.channel.bytes_sent == sent, "nothing may be sent on an old lease"
        assert me.session.stats().void_rounds > voided
        together.wait(60)
        free.set()
        until(watch.is_member, 60.0)
        me.train_until(lambda: me.session._rounds.channel.bytes_sent > sent)
        me.session.group.barrier()
        return longest

    beats = gg.Heartbeats(interval_seconds=0.03, lease_seconds=30.0, silent_seconds=60.0)
    assert max(run_mortals(2, main, mode="stale", heartbeats=beats)) < 15.0
