"""Each row belongs to one rank at every moment, whatever arrives when and whoever goes."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.data._ring_shuffle_ring import Ring
from gossipgrad.data._ring_shuffle_rows import Flow, Rows
from support.wires import Wires

RUN = bytes(16)


class Model:
    """A ring in one thread, and where each of its rows is."""

    def __init__(self, sizes, batch_size=3, credits=2):
        self.wires = Wires(len(sizes))
        self.sizes, self.credits = sizes, credits
        self.batch_size = batch_size
        self.flow = Flow(sizes, batch_size=batch_size, drop_last=False)
        self.rows, self.rings = [], []
        for rank, size in enumerate(sizes):
            ids = torch.arange(size) + sum(sizes[:rank])
            self.rows.append(Rows([ids, ids.double().reshape(-1, 1, 1) / 2]))
            self.rings.append(
                Ring(
                    self.wires.transport(rank),
                    self.rows[rank],
                    run=RUN,
                    credits=credits,
                    most_rows=self.flow.most_rows,
                )
            )
        self.steps = [0] * len(sizes)
        self.killed, self.left = set(), set()
        self.doomed = set()  # held by a rank that was killed, or on the way to or from it

    @property
    def present(self):
        return [r for r in range(len(self.sizes)) if r not in self.killed | self.left]

    def step(self, rank):
        """A batch of the slots in turn."""
        size, step = self.sizes[rank], self.steps[rank]
        start = step * self.batch_size % size
        slots = np.arange(start, min(start + self.batch_size, size))
        self.rings[rank].hand_out(slots, self.flow.rows(step))
        self.steps[rank] += 1

    def held(self, rank):
        ids, halves = self.rows[rank].content()
        assert torch.equal(ids.double() / 2, halves.flatten())  # tensors stay together
        return ids.tolist()

    def in_flight(self):
        """Sender, receiver and ids of what was sent and not taken."""
        for sender, ring in enumerate(self.rings):
            for receiver, link in ring.links.outgoing.items():
                taken = self.rings[receiver].links.incoming[sender].taken
                for number, parcel in link.unconfirmed:
                    if number > taken:
                        ids = self.rows[sender].format.views(parcel.payload, parcel.count)[0]
                        yield sender, receiver, ids.tolist()

    def kill(self, rank):
        self.doomed.update(self.held(rank))
        for sender, receiver, ids in self.in_flight():
            if rank in (sender, receiver):
                self.doomed.update(ids)
        self.killed.add(rank)
        self.wires.kill(rank)

    def leave(self, rank):
        self.left.add(rank)
        self.rings[rank].close(linger_seconds=0.0)

    def quieten(self):
        """Everything arrives, and everyone looks."""
        for _ in range(6):
            self.wires.deliver_all()
            for rank in [*self.present, *self.left]:
                self.rings[rank].poll()

    def check(self):
        """Each row is held by one rank, or in flight between two; only the doomed may be gone."""
        places = Counter()
        for rank in range(len(self.sizes)):
            if rank not in self.killed:
                assert not (self.rows[rank].vacant and self.rows[rank].unplaced)
                places.update(self.held(rank))
        for sender, receiver, ids in self.in_flight():
            if {sender, receiver} & self.killed:
                self.doomed.update(ids)
            else:
                places.update(ids)
        assert not [row for row, count in places.items() if count > 1], "doubled"
        missing = set(range(sum(self.sizes))) - set(places)
        assert missing <= self.doomed, f"lost: {missing - self.doomed}"


worlds = st.lists(st.integers(2, 12), min_size=2, max_size=9)
ranks = st.integers(0, 8)
quiet = st.one_of(
    st.tuples(st.just("step"), ranks),
    st.tuples(st.just("step"), ranks),
    st.tuples(st.just("deliver"), ranks, ranks, st.integers(1, 4)),
    st.tuples(st.just("deliver all")),
)
unquiet = st.one_of(quiet, quiet, quiet, st.tuples(st.sampled_from(["leave", "kill"]), ranks))


def play(model, script):
    for name, *arguments in script:
        p = len(model.sizes)
        if name == "deliver all":
            model.wires.deliver_all()
        elif name == "deliver":
            model.wires.deliver(arguments[0] % p, arguments[1] % p, arguments[2])
        elif (rank := arguments[0] % p) in model.present:
            getattr(model, name)(rank)
        model.check()


@settings(max_examples=20)
@given(worlds, st.lists(quiet, max_size=60), st.integers(1, 3))
def test_no_row_is_lost_or_doubled_while_messages_come_late(sizes, script, credits):
    model = Model(sizes, credits=credits)
    play(model, script)
    model.quieten()
    model.check()
    for _, receiver, _ in model.in_flight():  # only where there is no room
        assert model.rows[receiver].unplaced_count >= credits * model.flow.most_rows
    for ring, rows, size in zip(model.rings, model.rows, sizes, strict=True):
        most = credits * model.flow.most_rows
        held = int(rows.held.sum()) + rows.unplaced_count
        assert size - most <= held <= size + most + model.flow.most_rows
        assert ring.links.refused == 0
        assert ring.rows_lost == 0


@settings(max_examples=20)
@given(worlds, st.lists(unquiet, max_size=60), st.integers(1, 3))
def test_no_row_is_doubled_and_only_those_of_the_dead_are_lost(sizes, script, credits):
    model = Model(sizes, credits=credits)
    play(model, script)
    model.quieten()
    model.check()


@settings(max_examples=20)
@given(worlds, st.lists(quiet, max_size=40), st.data())
def test_those_that_remain_have_everything_when_ranks_have_left(sizes, script, data):
    """A leaver keeps what it has; what was on its way to it is back with its sender."""
    model = Model(sizes)
    play(model, script)
    for rank in data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True)):
        model.leave(rank)
        play(model, data.draw(st.lists(quiet, max_size=8)))
    model.quieten()
    model.check()
    present = set(model.present)
    assert not [
        ids for sender, to, ids in model.in_flight() if sender in present and to not in present
    ]


@pytest.mark.parametrize("p", [2, 3, 8])
def test_in_step_a_shard_moves_on_by_one_rank_an_epoch(p):
    model = Model([6] * p, credits=1)
    for epoch in range(1, p + 1):
        for _ in range(2):
            for rank in range(p):
                model.step(rank)
            model.quieten()
        for rank in range(p):
            first = (rank + epoch) % p * 6
            assert sorted(model.held(rank)) == list(range(first, first + 6))
    assert [ring.late_rounds for ring in model.rings] == [0] * p


def test_a_rank_that_stood_still_passes_on_what_it_has_too_much_of():
    model = Model([60] * 4, credits=8)
    for _ in range(60):
        for rank in (0, 1, 3):
            model.step(rank)
            model.wires.deliver_all()
    assert min(model.rings[rank].late_rounds for rank in (0, 1, 3)) > 10
    assert len(model.rows[1].vacant) == 8 * 3  # as short as its credits allow
    for _ in range(60):
        for rank in range(4):
            model.step(rank)
            model.wires.deliver_all()
        model.check()
    model.quieten()
    assert max(len(rows.vacant) for rows in model.rows) <= 3 * 3  # each other has one parcel
    assert max(rows.unplaced_count for rows in model.rows) <= 3
    before = [ring.late_rounds for ring in model.rings]
    for rank in range(4):
        model.step(rank)
    assert [ring.late_rounds for ring in model.rings] == before


def test_a_message_that_vanishes_leaves_its_rows_with_their_sender():
    model = Model([6, 6, 6])
    model.step(1)
    model.wires.under_way[1, 0].clear()
    for _ in range(6):
        for rank in range(3):
            model.step(rank)
        model.quieten()
    assert model.rings[0].links.refused == 1  # nothing is taken past the gap
    model.check()
    model.leave(0)
    model.quieten()
    model.check()
    assert not list(model.in_flight())


def test_a_killed_rank_takes_along_what_it_held_and_what_was_on_its_way(caplog):
    model = Model([6, 6, 6])
    model.step(2)
    model.kill(1)
    model.quieten()
    model.check()
    assert model.rings[2].rows_lost == 3
    assert "rank 1 died, and 3 rows on their way to it are lost; the ring closes" in caplog.text
    for _ in range(8):
        for rank in model.present:
            model.step(rank)
        model.quieten()
    assert sorted(model.held(0) + model.held(2)) == [0, 1, 2, 3, 4, 5, 15, 16, 17]
    assert model.rings[2].rows_out > 3  # they go on, with each other


def test_the_last_rank_still_sees_every_row():
    """Rows without a slot get their turn when there is nobody to send to."""
    model = Model([6, 6])
    model.wires.deliver_all()
    model.step(1)
    model.quieten()
    model.kill(1)
    model.quieten()
    assert model.rows[0].unplaced_count == 3
    seen = set()
    for _ in range(8):
        seen.update(model.rows[0].read(np.arange(6))[0].tolist())
        model.step(0)
    assert seen == {*range(6), 6, 7, 8}
