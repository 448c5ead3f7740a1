"""Neighbours that are late, leave or die: nobody waits, and each row belongs to one rank."""

import random
import threading
import time
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, ScriptedDeathError
from support.links import make_transports
from support.ranks import run_ranks
from support.storm import Storm, StormyTransport
from support.waiting import HANG_SECONDS, until
from support.wires import Wires

SIZE, BATCH = 12, 4


class Walker:
    """A shuffle, and its batches through all epochs."""

    def __init__(self, shuffle):
        self.shuffle, self.rank = shuffle, shuffle.rank
        self._batches = chain.from_iterable(iter(lambda: iter(shuffle), None))

    def steps(self, count):
        for _ in range(count):
            next(self._batches)

    def steps_until_gone(self, rank):
        """Goes on until it is known that a rank has left or died, however late that is."""
        until(lambda: self.steps(1) or rank in self.shuffle.stats().ranks_gone)


def run(
    p, function, *, kind="in-process", wrap=lambda end: end, leave_seconds=HANG_SECONDS, **options
):
    """`function(walker)` on every rank; what each then holds, and its figures."""
    ends = [wrap(end) for end in make_transports(kind, p)]

    def main(rank, group):
        shuffle = gg.RingShuffle(
            torch.arange(SIZE) + SIZE * rank,
            batch_size=BATCH,
            process_group=group,
            transport=lambda group: ends[rank],
            **options,
        )
        try:
            function(Walker(shuffle))
        except ScriptedDeathError:
            return [], None
        finally:
            shuffle.close(leave_seconds)
        return shuffle.rows()[0].tolist(), shuffle.stats()

    return zip(*run_ranks(p, main), strict=True)


def flat(parts):
    return list(chain.from_iterable(parts))


@pytest.mark.parametrize("kind", ["in-process", "tcp"])
@pytest.mark.parametrize("p", [2, 5])
def test_ranks_that_leave_after_unequal_steps_take_no_row_along(p, kind):
    def train(walker):
        pauses = random.Random(walker.rank)
        for _ in range(3 + 4 * walker.rank):
            walker.steps(1)
            time.sleep(pauses.random() / 500)

    held, stats = run(p, train, kind=kind)
    assert sorted(flat(held)) == list(range(p * SIZE))
    assert [s.rows_lost for s in stats] == [0] * p


def test_a_late_neighbour_blocks_no_step():
    """What rank 1 sends to rank 0 comes when all have made their steps."""
    storm, together = Storm(3, "", "", 0.0, ()), threading.Barrier(3, timeout=HANG_SECONDS)

    def train(walker):
        walker.steps(2)
        together.wait()
        storm.part({0}, {1})
        for _ in range(28):
            walker.steps(1)
            time.sleep(0.002)
        together.wait()
        storm.heal()

    held, stats = run(3, train, wrap=lambda end: StormyTransport(end, storm), credits=2)
    assert sorted(flat(held)) == list(range(3 * SIZE))
    assert stats[0].late_rounds > 0
    assert stats[0].rows_stale > 0


@pytest.mark.parametrize("p", [2, 3, 6])
def test_a_killed_rank_takes_along_its_rows_and_those_on_their_way(p, caplog):
    def train(walker):
        for _ in range(20):
            walker.steps(1)
            time.sleep(0.002)
        if walker.rank in {0, 1, 2 % p}:  # it dies when it has sent so much, and these hear of it
            walker.steps_until_gone(1)

    faults = Faults().kill(rank=1, round=5)
    held, stats = run(p, train, wrap=lambda end: FaultyTransport(end, faults), leave_seconds=0.5)
    rows = flat(held)
    assert len(set(rows)) == len(rows)
    lost = sum(s.rows_lost for s in stats if s is not None)
    missing = set(range(p * SIZE)) - set(rows)
    surplus = 2 * 8 * BATCH  # in flight or without a slot
    assert SIZE - 8 * BATCH <= len(missing) <= SIZE + lost + surplus
    assert all(1 in stats[rank].ranks_gone for rank in {0, 2 % p})
    assert "rank 1 died" in caplog.text


class World:
    """Shuffles in one thread, over wires on which a test says what arrives when."""

    def __init__(self, sizes, **options):
        self.sizes, self.wires = sizes, Wires(len(sizes))

        def main(rank, group):
            ids = torch.arange(sizes[rank]) + sum(sizes[:rank])
            return gg.RingShuffle(
                ids,
                ids.double().reshape(-1, 1, 1) / 2,
                batch_size=3,
                process_group=group,
                transport=lambda group: self.wires.transport(rank),
                **options,
            )

        self.walkers = [Walker(shuffle) for shuffle in run_ranks(len(sizes), main)]
        self.killed, self.left = set(), set()

    @property
    def present(self):
        return [r for r in range(len(self.sizes)) if r not in self.killed | self.left]

    def held(self, rank):
        ids, halves = self.walkers[rank].shuffle.rows()
        assert torch.equal(ids.double() / 2, halves.flatten())  # tensors stay together
        return ids.tolist()

    def step(self, rank):
        self.walkers[rank].steps(1)

    def kill(self, rank):
        self.killed.add(rank)
        self.wires.kill(rank)

    def leave(self, rank):
        self.left.add(rank)
        self.walkers[rank].shuffle.close(0.0)

    def check(self):
        """No row is at two ranks; while all live, those in flight are all that is missing."""
        there = [r for r in range(len(self.sizes)) if r not in self.killed]
        times = Counter(chain.from_iterable(map(self.held, there)))
        assert not [row for row, count in times.items() if count > 1], "doubled"
        if not self.killed:
            flying = sum(self.walkers[r].shuffle.stats().rows_in_flight for r in there)
            assert sum(self.sizes) - len(times) <= flying, "lost"

    def play(self, script):
        for name, *arguments in script:
            p = len(self.sizes)
            if name == "deliver all":
                self.wires.deliver_all()
            elif name == "deliver":
                self.wires.deliver(arguments[0] % p, arguments[1] % p, arguments[2])
            elif (rank := arguments[0] % p) in self.present:
                getattr(self, name)(rank)
            self.check()

    def settle(self):
        """All leave, one after another, and every message arrives."""
        for rank in self.present:
            for _ in range(3):
                self.wires.deliver_all()
                for other in self.present:
                    self.step(other)
            self.leave(rank)
        self.check()


worlds = st.lists(st.integers(2, 12), min_size=2, max_size=6)
ranks = st.integers(0, 5)
quiet = st.one_of(
    st.tuples(st.just("step"), ranks),
    st.tuples(st.just("step"), ranks),
    st.tuples(st.just("deliver"), ranks, ranks, st.integers(1, 4)),
    st.tuples(st.just("deliver all")),
)
unquiet = st.one_of(quiet, quiet, quiet, st.tuples(st.sampled_from(["leave", "kill"]), ranks))


@settings(max_examples=15)
@given(worlds, st.lists(quiet, max_size=50), st.integers(1, 3))
def test_no_row_is_lost_or_doubled_while_messages_come_late(sizes, script, credits):
    world = World(sizes, credits=credits)
    world.play(script)
    world.settle()
    assert sorted(flat(map(world.held, range(len(sizes))))) == list(range(sum(sizes)))
    assert not any(walker.shuffle.stats().rows_lost for walker in world.walkers)


@settings(max_examples=15)
@given(worlds, st.lists(unquiet, max_size=50), st.integers(1, 3))
def test_no_row_is_doubled_when_ranks_leave_and_die(sizes, script, credits):
    world = World(sizes, credits=credits)
    world.play(script)
    for _ in range(3):
        world.wires.deliver_all()
        world.play([("step", rank) for rank in world.present])
