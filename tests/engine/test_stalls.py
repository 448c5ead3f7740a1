"""Ranks whose lease runs out: nobody waits for a round that they do not send."""

import itertools
import os
import signal
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, Hub
from support.hanging_store import Hanging
from support.processes import run_processes
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd
from support.sessions import Trainer
from support.waiting import HANG_SECONDS, until

LEASE = gg.Heartbeats(interval_seconds=0.03, lease_seconds=0.5, silent_seconds=100.0)
PATIENT = gg.Overlap(patience_seconds=300.0)
"""A step that waits in vain outlasts the test."""


def run_stalling(world_size, use, **settings):
    """Run `use(me, stores)` in a thread per rank; each has a store that can be stopped."""
    inner, hub = dist.HashStore(), Hub(world_size)
    stores = [Hanging(inner, answers=True) for _ in range(world_size)]

    def rank_main(rank, _):
        model, group = network(), Group(stores[rank], rank, world_size)
        optimizer = sgd(list(model.parameters()))
        settings["transport"] = lambda group: hub.transport(group.rank)
        try:
            with gg.gossip(
                model, optimizer, process_group=group, heartbeats=LEASE, mode=PATIENT, **settings
            ) as session:
                result = use(Trainer(group, model, optimizer, session, set_gradients), stores)
                group.barrier()
                return result
        finally:
            for store in stores:
                store.answers.set()

    return run_ranks(world_size, rank_main)


def test_heartbeats_begin_before_the_model_is_sent(monkeypatch):
    """Otherwise all leases are old when a large model has arrived, and round 0 is void."""
    send, entered = Group.broadcast_, threading.Barrier(2)

    def send_slowly(group, tensor, source=None):
        if tensor.numel() > 1:
            entered.wait(HANG_SECONDS)
            before = group.store.written
            until(lambda: group.store.written > before + 3)
        return send(group, tensor, source)

    monkeypatch.setattr(Group, "broadcast_", send_slowly)
    assert run_stalling(2, lambda me, stores: me.train(3)) == [None, None]


@pytest.mark.parametrize(("topology", "world_size"), [("dissemination", 3), ("matching", 4)])
def test_nobody_waits_for_a_rank_whose_lease_ends_while_it_waits(topology, world_size):
    """Rank 1 waits for others in a step, its store is stopped, and its lease runs out."""
    is_over = threading.Event()

    def use(me, stores):
        me.train(4)
        me.group.barrier()
        if me.rank == 1:
            me.train()  # sends a round that the others do not send yet
            stores[1].answers.clear()

            def end_wait():
                until(lambda: not me.session._members.watch.is_member())
                is_over.set()

            threading.Thread(target=end_wait, daemon=True).start()
        else:
            assert is_over.wait(HANG_SECONDS)
        me.train()
        stores[1].answers.set()
        me.train(8)
        return me.outcomes["late"]

    assert run_stalling(world_size, use, topology=topology) == [0] * world_size


@pytest.mark.parametrize("topology", ["dissemination", "matching"])
def test_nobody_waits_for_long_while_the_store_stands_still(topology):
    together, holds = threading.Barrier(3), [False] * 3

    def train_until_all(me, condition):
        """All ranks take equally many steps, so that none waits for one that is done."""
        while True:
            me.train(1)
            holds[me.rank] = condition()
            together.wait(HANG_SECONDS)
            is_over = all(holds)
            together.wait(HANG_SECONDS)
            if is_over:
                return

    def use(me, stores):
        me.train(4)
        me.group.barrier()
        stores[me.rank].answers.clear()
        watch = me.session._members.watch
        train_until_all(me, lambda: watch.store_lost is not None)
        me.train(8)
        stores[me.rank].answers.set()
        train_until_all(me, lambda: watch.store_lost is None)
        me.train(8)
        return me.outcomes["late"], me.session.membership.generation

    assert run_stalling(3, use, topology=topology) == [(0, 0)] * 3


MODES = [
    *itertools.product(["dissemination", "matching"], [PATIENT, gg.Sync()]),
    ("matching", gg.Stale()),
]


def train_and_stop(rank, store):
    """Train in each mode and topology; rank 1 is stopped in a step for longer than its lease."""
    late = []
    for topology, mode in MODES:
        model = network()
        optimizer = sgd(list(model.parameters()))
        beats = gg.Heartbeats(interval_seconds=0.2, lease_seconds=1.0, silent_seconds=100.0)
        with gg.gossip(model, optimizer, topology=topology, mode=mode, heartbeats=beats) as session:
            for step in range(12):
                if rank == 1 and step == 5:
                    me = os.getpid()
                    subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 1.5; kill -CONT {me}"])
                set_gradients(model, rank, step)
                optimizer.step()
            session.consensus_distance()
            late.append(session.stats().outcomes["late"])
            assert session.membership.generation == 0
    return late


def train_and_die(rank, store, noticed):
    """Rank 2 is killed while a worker that it has forked still lives."""
    model = network()
    optimizer = sgd(list(model.parameters()))
    beats = gg.Heartbeats(silent_seconds=300.0)
    with gg.gossip(model, optimizer, topology="matching", heartbeats=beats) as session:
        me = Trainer(session.group, model, optimizer, session, set_gradients)
        me.train(12)
        if rank == 2:
            if os.fork() == 0:
                for _ in range(2400):
                    time.sleep(0.1)
                    if noticed.exists():
                        break
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        me.train_until(lambda: 2 in session.membership.lost)
        noticed.touch()
        return session.membership.living


@pytest.mark.process
def test_a_rank_that_is_killed_is_noticed_although_its_workers_live(tmp_path):
    assert run_processes(3, train_and_die, tmp_path / "noticed", may_die=(2,))[:2] == [
        (0, 1),
        (0, 1),
    ]


@pytest.mark.process
def test_a_rank_that_is_stopped_for_longer_than_its_lease_in_every_mode():
    for late in run_processes(3, train_and_stop):
        assert late[:4] == [0] * 4
