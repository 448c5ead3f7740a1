"""Neighbours that are late, leave or die: nobody waits, and no row goes astray."""

import random
import threading
import time
import weakref
from itertools import chain

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, ScriptedDeathError
from gossipgrad.data import _ring_shuffle
from gossipgrad.errors import GossipError
from support.links import make_transports
from support.ranks import run_ranks
from support.storm import Storm, StormyTransport
from support.waiting import until

SIZE, BATCH = 12, 4


def run(p, function, *, kind="in-process", faults=None, storm=None, **options):
    """`function(shuffle)` on every rank; what each then holds, and its figures."""
    ends = make_transports(kind, p)
    if faults is not None:
        ends = [FaultyTransport(end, faults) for end in ends]
    if storm is not None:
        ends = [StormyTransport(end, storm) for end in ends]

    def main(rank, group):
        ids = torch.arange(SIZE) + SIZE * rank
        shuffle = gg.RingShuffle(
            ids,
            batch_size=BATCH,
            process_group=group,
            transport=lambda group: ends[rank],
            **options,
        )
        try:
            with shuffle:
                function(shuffle)
        except ScriptedDeathError:
            return [], None
        return shuffle.rows()[0].tolist(), shuffle.stats()

    return zip(*run_ranks(p, main), strict=True)


def flat(parts):
    return list(chain.from_iterable(parts))


def endless(shuffle):
    while True:
        yield from shuffle


def steps(shuffle, count):
    """Goes on where it stopped."""
    if shuffle not in batches:
        batches[shuffle] = endless(shuffle)
    for _ in range(count):
        next(batches[shuffle])


batches = weakref.WeakKeyDictionary()


def steps_until_gone(shuffle, rank):
    """Goes on until it is known that a rank has left or died, however late that is."""
    until(lambda: steps(shuffle, 1) or rank in shuffle.stats().ranks_gone, timeout_seconds=50)


@pytest.fixture(autouse=True)
def leave_in_order(monkeypatch):
    """However late a neighbour is, who leaves hears from it which rows it has taken."""
    monkeypatch.setattr(_ring_shuffle, "_LINGER_SECONDS", 50.0)


@pytest.fixture
def leave_soon(leave_in_order, monkeypatch):
    """For who would wait in vain."""
    monkeypatch.setattr(_ring_shuffle, "_LINGER_SECONDS", 0.5)


@pytest.mark.parametrize("kind", ["in-process", "zeromq"])
@pytest.mark.parametrize("p", [2, 5])
def test_ranks_that_leave_after_unequal_steps_take_no_row_along(p, kind):
    def train(shuffle):
        pauses = random.Random(shuffle.rank)
        for _ in range(3 + 4 * shuffle.rank):
            steps(shuffle, 1)
            time.sleep(pauses.random() / 500)

    held, stats = run(p, train, kind=kind)
    assert sorted(flat(held)) == list(range(p * SIZE))
    assert [s.rows_lost for s in stats] == [0] * p


def test_an_exception_leaves_the_ring_in_order():
    def train(shuffle):
        steps(shuffle, 2)
        if shuffle.rank == 1:
            raise KeyboardInterrupt
        steps(shuffle, 10)
        steps_until_gone(shuffle, 1)

    def guarded(shuffle):
        try:
            with shuffle:
                train(shuffle)
        except KeyboardInterrupt:
            assert shuffle.rank == 1

    held, stats = run(3, guarded)
    assert sorted(flat(held)) == list(range(3 * SIZE))
    assert 1 in stats[0].ranks_gone


def test_a_late_neighbour_blocks_no_step():
    """What rank 1 sends to rank 0 comes when all have made their steps."""
    storm, together = Storm(3, "", "", 0.0, ()), threading.Barrier(3, timeout=50)

    def train(shuffle):
        steps(shuffle, 2)
        together.wait()
        storm.part({0}, {1})
        for _ in range(28):
            steps(shuffle, 1)
            time.sleep(0.002)
        assert shuffle.stats().exposed_seconds == 0.0
        together.wait()
        storm.heal()
        shuffle.drain()

    held, stats = run(3, train, storm=storm, credits=2)
    assert sorted(flat(held)) == list(range(3 * SIZE))
    assert stats[0].late_rounds > 0
    assert stats[0].rows_stale > 0
    assert [s.rows_held for s in stats] == [SIZE] * 3


def test_memory_is_bounded_when_a_neighbour_stands_still():
    back = threading.Event()
    most = []

    def train(shuffle):
        if shuffle.rank == 1:
            assert back.wait(50)
        for _ in range(60):
            steps(shuffle, 1)
            time.sleep(0.001)
            most.append(shuffle.stats().extra_memory_bytes)
        if shuffle.rank == 2:
            back.set()
        shuffle.drain()

    held, _ = run(4, train, credits=3)
    assert sorted(flat(held)) == list(range(4 * SIZE))
    assert 0 < max(most) <= 3 * 3 * BATCH * 8


def test_with_a_deadline_a_stuck_neighbour_is_awaited_once(caplog):
    back = threading.Event()

    def train(shuffle):
        if shuffle.rank == 1:
            assert back.wait(50)
            return
        steps(shuffle, 40)
        assert shuffle.stats().exposed_seconds >= 0.3
        told = [record.getMessage() for record in caplog.records]
        assert told == ["rank 0: a neighbour is late; its rows stay as they are"]
        if shuffle.rank == 0:
            back.set()

    held, _ = run(2, train, deadline_seconds=0.3, credits=2)
    assert sorted(flat(held)) == list(range(2 * SIZE))


@pytest.mark.usefixtures("leave_soon")
@pytest.mark.parametrize("p", [2, 3, 6])
def test_a_killed_rank_takes_along_its_rows_and_those_on_their_way(p, caplog):
    def train(shuffle):
        for _ in range(20):
            steps(shuffle, 1)
            time.sleep(0.002)
        if shuffle.rank in {0, 1, 2 % p}:  # it dies when it has sent so much, and these hear of it
            steps_until_gone(shuffle, 1)

    held, stats = run(p, train, faults=Faults().kill(rank=1, round=5))
    rows = flat(held)
    assert len(set(rows)) == len(rows)
    lost = sum(s.rows_lost for s in stats if s is not None)
    missing = set(range(p * SIZE)) - set(rows)
    surplus = 3 * 8 * BATCH  # in a parcel, in flight or without a slot
    assert SIZE - 8 * BATCH <= len(missing) <= SIZE + lost + surplus
    assert lost == 0 or f"and {lost} rows on their way to it are lost" in caplog.text
    assert all(1 in stats[rank].ranks_gone for rank in {0, 2 % p})
    assert "rank 1 died" in caplog.text


def test_drain_names_who_did_not_come():
    settled = threading.Barrier(2)

    def train(shuffle):
        steps(shuffle, 2)
        if shuffle.rank == 0:
            with pytest.raises(GossipError, match=r"waited 0.2 s for ranks \[1\] to call drain"):
                shuffle.drain(timeout_seconds=0.2)
        settled.wait(50)

    held, _ = run(2, train)
    assert sorted(flat(held)) == list(range(2 * SIZE))


@pytest.mark.usefixtures("leave_soon")
def test_settle_goes_on_without_a_rank_that_has_left():
    left = threading.Event()

    def train(shuffle):
        steps(shuffle, 4)
        if shuffle.rank == 2:
            shuffle.close()
            left.set()
            return
        assert left.wait(50)
        steps(shuffle, 2 + shuffle.rank)
        shuffle.drain()
        assert shuffle.stats().rows_in_flight == 0

    held, _ = run(4, train)
    assert sorted(flat(held)) == list(range(4 * SIZE))


def test_states_saved_together_hold_every_row_once():
    """Some ranks go on at once after settling; their rows are not in others' states."""
    states = {}

    def train(shuffle):
        for number in range(6):
            steps(shuffle, 1 + shuffle.rank)
            shuffle.drain()
            if shuffle.rank:
                time.sleep(0.01)
            states[shuffle.rank, number] = shuffle.state_dict()

    run(3, train)
    for number in range(6):
        rows = []
        for rank in range(3):
            state = states[rank, number]
            rows += state["tensors"][0][state["held"]].tolist() + state["unplaced"][0].tolist()
        assert sorted(rows) == list(range(3 * SIZE))
