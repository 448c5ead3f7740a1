"""Collectives that come about, fail, or fail on one rank only: what one end counts, both do."""

from random import Random

import pytest
import torch

from gossipgrad.comm import Channel, Outcome, Part
from support.links import RUN
from support.wires import Wires

D, L, V = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID
BUCKETS = 2


class Meetings:
    """Two ranks that post a round's buckets one by one, and come to collectives between rounds."""

    def __init__(self):
        self.wires = Wires(2)
        plan = [Part(torch.float32, 1)] * BUCKETS
        self.ends = [
            Channel(self.wires.transport(rank), run=RUN, plan=plan, credits=3) for rank in (0, 1)
        ]
        self.posted = [0, 0]  # buckets of all rounds
        self.exchanges = ({}, {})
        self.came = [None, None]  # fence of each, while it is in a collective
        self.waiting = [None, None]  # those of collectives that have not come about yet
        self.cut_in = -1  # the last generation in which a link broke
        self.outcomes = [None, None]  # of a meeting that came about, for those who are there still

    def post(self, rank):
        if self.came[rank] is None:
            round, bucket = divmod(self.posted[rank], BUCKETS)
            end, payload = self.ends[rank], torch.ones(1)
            exchange = end.post(round, bucket, payload, send_to=1 - rank, recv_from=1 - rank)
            self.exchanges[rank][end.generation, round, bucket] = exchange
            self.posted[rank] += 1

    def meet(self, rank):
        while self.posted[rank] % BUCKETS:
            self.post(rank)
        if self.came[rank] is None:
            self.came[rank] = self.waiting[rank] = self.ends[rank].fence()
            same = self.ends[0].generation == self.ends[1].generation
            if None not in self.waiting and same:
                round = max(self.posted) // BUCKETS
                self.outcomes = [(dict(enumerate(self.waiting)), round)] * 2
                self.waiting = [None, None]

    def resume(self, rank):
        if self.outcomes[rank] is not None:
            came, round = self.outcomes[rank]
            self.ends[rank].resume(came, round)
            self.posted[rank] = round * BUCKETS
            self.came[rank] = self.outcomes[rank] = None

    def fail(self, rank):
        if self.came[rank] is not None:
            self.ends[rank].abort()
            self.came[rank] = self.waiting[rank] = self.outcomes[rank] = None

    def enter(self, rank):
        if self.came[rank] is None and self.posted[rank] % BUCKETS == 0:
            end = self.ends[rank]
            end.enter(end.generation + 1, self.posted[rank] // BUCKETS, [0, 1])

    def cut(self, rank):
        """Its link to the other breaks; what was on its way on it is lost."""
        if self.ends[rank].gone == {}:
            self.wires.under_way[rank, 1 - rank].clear()
            self.ends[rank]._lose(1 - rank, "was lost")
            self.cut_in = max(end.generation for end in self.ends)

    def deliver(self, rank):
        """One message to a rank."""
        self.wires.deliver(1 - rank, rank)
        self.ends[rank].poll()

    def rest(self):
        last = max(end.generation for end in self.ends) + 1
        for rank in (0, 1):
            self.fail(rank)
            while self.posted[rank] % BUCKETS:
                self.post(rank)
        self.posted = [max(self.posted)] * 2
        for end in self.ends:
            end.enter(last, self.posted[0] // BUCKETS, [0, 1])
        self.wires.deliver_all()
        for end in self.ends:
            end.poll()

    def go_on(self, rounds=2):
        """What comes next counts, once both have heard that the other has come so far."""
        for _ in range(rounds):
            for rank in (0, 1):
                for _ in range(BUCKETS):
                    self.post(rank)
            self.wires.deliver_all()
            for end in self.ends:
                end.poll()
        assert [list(mine.values())[-1].outcome for mine in self.exchanges] == [D, D]

    def check(self):
        self.rest()
        counted = [
            {key for key, e in mine.items() if e.outcome is D and key[0] > self.cut_in}
            for mine in self.exchanges
        ]
        assert counted[0] == counted[1]
        self.go_on()
        assert not any(e.open for mine in self.exchanges for e in mine.values())
        for end in self.ends:
            end.close(0.0)


ACTS = ["post"] * 4 + ["deliver"] * 6 + ["meet", "resume", "fail"]


@pytest.mark.parametrize(
    "acts",
    [ACTS, [*ACTS, "enter"], [*ACTS, "enter", "enter", "cut"]],
    ids=["one generation", "several", "links break"],
)
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_collective_leaves_exchanges_on_both_ends_or_on_neither(acts, seed):
    for script in range(8):
        random = Random(f"{seed} {script}")
        ranks = Meetings()
        for _ in range(random.choice([20, 60, 120])):
            getattr(ranks, random.choice(acts))(random.randrange(2))
        ranks.check()


def test_a_collective_of_which_a_broken_link_told_nothing_spoils_no_later_round():
    ranks = Meetings()
    ranks.cut(1)
    for what in ("enter", "meet", "fail"):
        getattr(ranks, what)(0)
    for _ in range(3):
        ranks.deliver(1)  # in vain
    ranks.enter(1)
    for _ in range(3):
        ranks.deliver(0)
    ranks.go_on(rounds=4)
    ranks.check()


def test_many_collectives_leave_no_early_parts():
    ranks = Meetings()
    for _ in range(20):
        for what in ("post", "meet", "resume"):
            for rank in (0, 1):
                getattr(ranks, what)(rank)
        ranks.wires.deliver_all()
        for end in ranks.ends:
            end.poll()
    assert not any(end.early_bytes for end in ranks.ends)
    ranks.check()


@pytest.mark.parametrize("when", ["it settles", "it goes on", "it has sent, too"])
def test_a_part_that_comes_after_a_failed_collective_counts_on_neither_end(when):
    """The peer had sent it, and took it for void when it heard that this rank had settled."""
    ranks = Meetings()
    ranks.post(0), ranks.post(0)
    if when == "it settles":
        ranks.deliver(1), ranks.deliver(1)
    ranks.meet(1)
    ranks.deliver(0)
    ranks.fail(1)
    if when == "it has sent, too":
        ranks.post(1), ranks.post(1)
    ranks.deliver(1), ranks.deliver(1)
    ranks.post(1), ranks.post(1)
    ranks.deliver(0), ranks.deliver(0), ranks.deliver(0)
    round_0 = [mine[0, 0, bucket].outcome for mine in ranks.exchanges for bucket in range(BUCKETS)]
    assert round_0 == [V] * 4
    ranks.posted = [max(ranks.posted)] * 2
    ranks.go_on(rounds=4)
    ranks.check()


def test_a_rank_that_is_ahead_does_not_wait_for_one_in_a_collective(channels):
    a, b = channels()
    fence = a.fence()
    ahead = b.post(200, 0, torch.zeros(4), send_to=0, recv_from=0)
    assert b.take(ahead, 30.0) is V, "nothing is sent before the collective is over"
    others = b.fence()
    for end in (a, b):
        end.resume({0: fence, 1: others}, 201)
    sent = [
        end.post(201, 0, torch.ones(4), send_to=1 - r, recv_from=1 - r)
        for r, end in ((0, a), (1, b))
    ]
    assert [end.take(x, 30.0) for end, x in zip((a, b), sent, strict=True)] == [D, D]


def test_rounds_may_go_back_after_a_collective(channels):
    """As when a state is loaded: what was sent of a round before does not count for it again."""
    a, b = channels()
    a.post(7, 0, torch.full((4,), 9.0), send_to=1, recv_from=1)
    fences = {0: a.fence(), 1: b.fence()}
    for end in (a, b):
        end.resume(fences, 8)
        end.restart(3, [0, 1])
    mine = a.post(3, 0, torch.ones(4), send_to=1, recv_from=1)
    again = b.post(3, 0, torch.ones(4), send_to=0, recv_from=0)
    assert (a.take(mine, 30.0), b.take(again, 30.0)) == (D, D)
    late = [
        e.post(7, 0, torch.ones(4), send_to=1 - r, recv_from=1 - r) for r, e in ((0, a), (1, b))
    ]
    assert [end.take(x, 30.0) for end, x in zip((a, b), late, strict=True)] == [D, D]
    assert late[1].received.tolist() == [1.0] * 4


def test_a_collective_that_failed_on_one_rank_alone_costs_a_few_rounds(channels):
    a, b = channels()
    a.fence()
    a.abort()
    for round in range(20):
        sides = [
            e.post(round, 0, torch.ones(4), send_to=1 - r, recv_from=1 - r)
            for r, e in ((0, a), (1, b))
        ]
        a.poll()
        if [e.take(x, 5.0) for e, x in zip((a, b), sides, strict=True)] == [D, D]:
            break
    assert round < 5
