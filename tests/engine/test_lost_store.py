"""Training while the rendezvous store is lost, or stands still."""

import logging

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Group
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
        until(lambda: watch.store_lost)
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
            pytest.raises(gg.GossipError, match="the rendezvous store is lost") as caught,
            me.session.consensus(),
        ):
            pass
        assert "rank" in str(caught.value)
        assert "model.state_dict()" in str(caught.value)
        me.train(2)
        assert me.session.unreachable.keys() >= {1}  # rank 2 may have left by now
        assert "its link broke, and the rendezvous store is lost" in me.session.unreachable[1]
        if me.rank == 0:
            me.train_until(lambda: me.session.unreachable.keys() == {1, 2})
            assert me.session.unreachable[2] == "left"
        return mean

    with caplog.at_level(logging.WARNING, "gossipgrad.comm._member_watch"):
        first, _, third = run_mortals(3, main)
    assert torch.equal(first, third)
    store_lost = [r.message for r in caplog.records if "the rendezvous store is lost" in r.message]
    assert len(store_lost) == 3


def test_a_store_that_hangs_does_not_hold_a_rank_up_as_it_starts():
    model, store = network(), Hanging()
    optimizer = sgd(list(model.parameters()))
    # A group that has come about before, as far as it is asked here.
    group = Group(store, 0, 2, members=(0,), timeout_seconds=0.2)
    try:
        with pytest.raises(gg.GossipError, match="rank 0 cannot reach the rendezvous store"):
            gg.gossip(model, optimizer, process_group=group, topology="matching")
    finally:
        store.answers.set()
