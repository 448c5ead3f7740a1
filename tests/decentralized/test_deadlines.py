"""Deadlines that adapt: a link that is slow is awaited, one that falls silent is not."""

import time

import networkx
import pytest

import gossipgrad as gg
from gossipgrad.comm import Hub, Outcome
from gossipgrad.decentralized import _in_turn
from gossipgrad.decentralized._deadlines import Deadlines
from gossipgrad.decentralized._listener import Listener
from gossipgrad.decentralized._transfer import Transfer
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
    really_take = Transfer.take

    def take(transfer, bucket, deadline):
        wait, link = deadline - time.perf_counter(), (transfer._channel.rank, transfer.peers)
        round, sender = transfer.round, transfer.peers.recv_from
        if round == 10 and sender in (1, 3) and link not in awaited:
            awaited[link] = wait
            return Outcome.LATE if wait < 1500.0 else really_take(transfer, bucket, deadline)
        outcome = really_take(transfer, bucket, time.perf_counter() + 60.0)
        if outcome is Outcome.DELIVERED and sender == 1:
            transfer.exchanges[bucket].finished_seconds += 80.0 + 10.0 * (round % 5)
        return outcome

    monkeypatch.setattr(Transfer, "take", take)

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
    """A transport that delivers, but does not let go of what it has sent."""

    def __init__(self, inner):
        self.rank, self.world_size, self.done = inner.rank, inner.world_size, False
        self.open, self.receive, self.forget = inner.open, inner.receive, inner.forget
        self.close, self._send = inner.close, inner.send

    def send(self, peer, header, payload=None):
        self._send(peer, header, payload)
        return self


def test_the_waits_of_a_step_share_one_deadline(monkeypatch):
    """No round leaves, nor is a snapshot let go: a step waits for a part, then for snapshots."""
    monkeypatch.setattr(Listener, "expect", lambda self, transfers: None)
    monkeypatch.setattr(_in_turn, "_PATIENCE_SECONDS", 30.0)
    hub = Hub(2)
    links = []

    def hold(group):
        links.append(Holding(hub.transport(group.rank)))
        return links[-1]

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        mode = gg.Overlap(deadline_seconds=0.3, floor_seconds=0.3)
        with gg.gossip(
            model, optimizer, process_group=group, mode=mode, transport=hold, heartbeats=None
        ) as session:
            (section,) = session._sections.weights
            acquire, waits = section.pool.acquire, []

            def acquire_in(wait, timeout_seconds):
                waits.append(timeout_seconds)
                return acquire(wait, timeout_seconds)

            section.pool.acquire = acquire_in
            for step in range(2):
                group.barrier()  # what the other has sent has come
                waits.clear()
                set_gradients(model, rank, step)
                start = time.perf_counter()
                optimizer.step()
                seconds = time.perf_counter() - start
            group.barrier()
            session._rounds.cancel()
            for link in links:
                link.done = True
            late = session.stats().late_rounds
        return late, seconds, waits

    for late, seconds, waits in run_ranks(2, rank_main):
        assert late == 1
        assert seconds >= 0.3, "for the part"
        assert len(waits) >= 2
        assert {*waits} == {0.0}, "nothing is left for snapshots"
