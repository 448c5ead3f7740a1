"""Deadlines that adapt: a link that is slow is awaited, one that falls silent is not."""

import time

import networkx
import pytest

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, Hub
from gossipgrad.decentralized._deadlines import Deadlines
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


def test_a_slow_link_is_told_from_a_silent_one():
    """One pair takes 0.1 s a round, the other is prompt; then both are 1.5 s late, once."""
    faults = Faults()
    for round in range(11):
        faults.delay(rank=1, round=round, seconds=0.1)
    for rank in (1, 3):
        faults.delay(rank=rank, round=10, seconds=1.5)
    hub = Hub(4)
    pairs = gg.topology.from_graph(networkx.Graph([(0, 1), (2, 3), (1, 2)]))

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        waits = []
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            transport=lambda group: FaultyTransport(hub.transport(group.rank), faults),
            topology=pairs,
            mode=gg.Overlap(floor_seconds=0.05, deadline_seconds=20.0),
        ) as session:
            for step in range(11):
                set_gradients(model, rank, step)
                time.sleep(0.07)  # compute, in which one of rank 1's two snapshots leaves
                start = time.perf_counter()
                optimizer.step()
                waits.append(time.perf_counter() - start)
            return max(waits), session.stats().late_rounds

    found = run_ranks(4, rank_main)
    assert [late for _, late in found] == [1, 0, 1, 0]
    assert max(wait for wait, _ in found) < 1.0


class Holding:
    """A transport that delivers, but does not let go of what it has sent."""

    def __init__(self, inner):
        self.rank, self.world_size, self.done = inner.rank, inner.world_size, False
        self.open, self.receive, self.forget = inner.open, inner.receive, inner.forget
        self.close, self._send = inner.close, inner.send

    def send(self, peer, header, payload=None):
        self._send(peer, header, payload)
        return self


def test_the_waits_of_a_step_share_one_deadline():
    """No snapshot is let go: the step waits for one, and again when it has looked at late ones."""
    hub = Hub(2)
    links = []

    def hold(group):
        links.append(Holding(hub.transport(group.rank)))
        return links[-1]

    def rank_main(rank, group):
        model = network()
        optimizer = sgd(list(model.parameters()))
        mode = gg.Overlap(deadline_seconds=0.6, floor_seconds=0.6)
        with gg.gossip(
            model, optimizer, process_group=group, mode=mode, transport=hold, heartbeats=None
        ) as session:
            seconds = []
            for step in range(2):
                set_gradients(model, rank, step)
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
                group.barrier()
            session._rounds.cancel()
            for link in links:
                link.done = True
        return seconds

    for seconds in run_ranks(2, rank_main):
        assert 0.5 < seconds[1] < 1.1
