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
                start = time.perf_counter()
                optimizer.step()
                waits.append(time.perf_counter() - start)
            return max(waits), session.stats().late_rounds

    found = run_ranks(4, rank_main)
    assert [late for _, late in found] == [1, 0, 1, 0]
    assert max(wait for wait, _ in found) < 1.0
