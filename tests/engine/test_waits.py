"""Deadlines that adapt: a link that is slow is awaited, one that falls silent is not."""

import threading
import time

import networkx
import pytest

import gossipgrad as gg
from gossipgrad.comm import Hub, Outcome

# Private: through a session, a wait of known length would take as long.
from gossipgrad.engine import _pacing
from gossipgrad.engine._transfer import Transfer
from gossipgrad.engine._waits import Deadlines
from support.ranks import run_ranks
from support.replicas import network, set_gradients, sgd


def test_a_few_stragglers_do_not_move_it_and_a_lasting_change_does():
    deadlines = Deadlines(floor_seconds=0.01, ceiling_seconds=9.0, deviations=4.0)
    for number in range(40):
        deadlines.note(1, 8.0 if number % 10 == 9 else 0.1)
    assert deadlines.of(1) == pytest.approx(0.1)
    assert deadlines.of(2) == 9.0  # another link, of which nothing is known
    for _ in range(40):
        deadlines.note(1, 2.0)
    assert deadlines.of(1) == pytest.approx(2.0)


def test_floor_and_ceiling_are_the_users():
    deadlines = Deadlines(floor_seconds=0.5, ceiling_seconds=0.7, deviations=1.0)
    for seconds, wait in ((0.0, 0.5), (0.6, 0.6), (5.0, 0.7)):
        for _ in range(40):
            deadlines.note(0, seconds)
        assert deadlines.of(0) == pytest.approx(wait)
    for _ in range(40):  # a ceiling below the floor is the wait
        deadlines.note(0, 0.0)
    short = Deadlines(floor_seconds=3.0, ceiling_seconds=1.0, deviations=1.0)
    for _ in range(5):
        short.note(0, 0.0)
    assert short.of(0) == 1.0


def test_a_slow_link_is_told_from_a_silent_one(monkeypatch):
    """What rank 1 sends takes 100 s, by script, the rest no time; then 1 and 3 are late, once."""
    hub, awaited = Hub(4), {}
    pairs = gg.topology.from_graph(networkx.Graph([(0, 1), (2, 3), (1, 2)]))
    really_wait = Transfer.wait

    def wait(transfer, bucket, deadline):
        seconds, link = deadline - time.perf_counter(), (transfer._channel.rank, transfer.peers)
        round, sender = transfer.round, transfer.peers.recv_from
        if round == 10 and sender in (1, 3) and link not in awaited:
            awaited[link] = seconds
            return Outcome.LATE if seconds < 1500.0 else really_wait(transfer, bucket, deadline)
        outcome = really_wait(transfer, bucket, time.perf_counter() + 60.0)
        if outcome is Outcome.DELIVERED and sender == 1:
            transfer.exchanges[bucket].finished_seconds += 80.0 + 10.0 * (round % 5)
        return outcome

    monkeypatch.setattr(Transfer, "wait", wait)

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: hub.transport(group.rank),
            topology=pairs,
            mode=gg.Overlap(floor_seconds=50.0, deadline_seconds=20_000.0),
        ) as session:
            for step in range(11):
                set_gradients(model, rank, step)
                optimizer.step()
            return session.stats().late_rounds

    assert run_ranks(4, rank_main) == [1, 0, 1, 0]
    waits = {(rank, peers.recv_from): wait for (rank, peers), wait in awaited.items()}
    assert waits.keys() == {(0, 1), (2, 3)}
    assert 150.0 < waits[0, 1] < 250.0
    assert 30.0 < waits[2, 3] <= 50.0


class Holding:
    """A transport that delivers, but keeps the memory of what it has sent until the end."""

    def __init__(self, inner, ended):
        self._inner, self._ended = inner, ended
        self.done = False
        self.wait = ended.wait

    def send(self, peer, header, payload=None):
        self._inner.send(peer, header, payload)
        return self

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_the_waits_of_a_step_share_one_deadline(monkeypatch):
    """The second round never leaves: its step waits for a part, and then for a snapshot."""
    monkeypatch.setattr(_pacing, "_PATIENCE_SECONDS", 30.0)
    hub, ended = Hub(2), threading.Event()

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            mode=gg.Overlap(deadline_seconds=1.0, floor_seconds=1.0),
            transport=lambda group: Holding(hub.transport(group.rank), ended),
            heartbeats=None,
        ) as session:
            for step in range(2):
                group.barrier()
                set_gradients(model, rank, step)
                start = time.perf_counter()
                optimizer.step()
                seconds = time.perf_counter() - start
            group.barrier()
            ended.set()
            return seconds, session.stats().late_rounds

    for seconds, late in run_ranks(2, rank_main):
        assert late == 1
        assert 1.0 <= seconds < 1.7
