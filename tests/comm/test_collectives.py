"""Collectives and generations come about, or fail on some ranks: what one end counts, both do."""

from random import Random

import pytest
import torch

from gossipgrad.comm import Channel, Header, Kind, Lost, Outcome, Part
from support.links import RUN
from support.wires import Wires, one_pair, symmetric

D, V = Outcome.DELIVERED, Outcome.VOID
BUCKETS = 2


def directed(rank, round):
    """A ring of three, now this way round and now that."""
    step = 1 + round % 2
    return (rank + step) % 3, (rank - step) % 3


class World:
    """Ranks that each do one thing after the other; links deliver when the test says so."""

    def __init__(self, schedule=one_pair, window=3):
        self.ranks = range(2 if schedule is one_pair else 3)
        self.schedule, self.wires = schedule, Wires(len(self.ranks))
        plan = [Part(torch.float64, 1)] * BUCKETS
        self.ends = [
            Channel(self.wires.transport(rank), run=RUN, plan=plan, window=window)
            for rank in self.ranks
        ]
        nothing = [None for _ in self.ranks]
        self.posted = [0 for _ in self.ranks]  # buckets of all rounds
        self.exchanges = [{} for _ in self.ranks]  # by generation, epoch, round, bucket
        self.fences = [*nothing]  # of each that is in a collective
        self.waiting = [*nothing]  # those of a collective that has not come about yet
        self.outcomes = [*nothing]  # of one that came about, for those who are there still
        self.cancelled = 0
        self.cut_in = -1  # the last generation in which a link broke

    def post(self, rank):
        if self.fences[rank] is None:
            round, bucket = divmod(self.posted[rank], BUCKETS)
            send_to, recv_from = self.schedule(rank, round)
            end = self.ends[rank]
            payload = torch.full((1,), 1000.0 * rank + round, dtype=torch.float64)
            exchange = end.post(round, bucket, payload, send_to=send_to, recv_from=recv_from)
            self.exchanges[rank][end.generation, end.epoch, round, bucket] = exchange
            self.posted[rank] += 1

    def post_round(self, rank):
        self.post(rank)
        while self.posted[rank] % BUCKETS:
            self.post(rank)

    def is_between_rounds(self, rank):
        return self.fences[rank] is None and self.posted[rank] % BUCKETS == 0

    def void(self, rank):
        if self.is_between_rounds(rank):
            round = self.posted[rank] // BUCKETS
            self.ends[rank].void(round, self.schedule(rank, round)[0])
            self.posted[rank] += BUCKETS

    def cancel(self, rank):
        """Gives up an exchange of which its partner is not known here to be ready."""
        for (*_, round, bucket), exchange in self.exchanges[rank].items():
            peer = exchange.peer
            if not exchange.open or peer is None:
                continue
            headers = [Header.unpack(each.header) for each in self.wires.under_way[peer, rank]]
            ready = [(h.round, h.bucket) for h in headers if h.kind is Kind.READY]
            posted = any(key[2:] == (round, bucket) for key in self.exchanges[peer])
            if not posted or (round, bucket) in ready:
                self.ends[rank].cancel(exchange)
                self.cancelled += 1
                return

    def meet(self, rank):
        if self.is_between_rounds(rank):
            self.fences[rank] = self.waiting[rank] = self.ends[rank].fence()
            if None not in self.waiting and len({end.generation for end in self.ends}) == 1:
                came = dict(enumerate(self.waiting)), max(self.posted) // BUCKETS
                self.outcomes = [came for _ in self.ranks]
                self.waiting = [None for _ in self.ranks]

    def resume(self, rank):
        if self.outcomes[rank] is not None:
            fences, round = self.outcomes[rank]
            self.ends[rank].resume(fences, round)
            self.posted[rank] = round * BUCKETS
            self.fences[rank] = self.outcomes[rank] = None

    def fail(self, rank):
        if self.fences[rank] is not None:
            self.fences[rank] = self.waiting[rank] = self.outcomes[rank] = None

    def enter(self, rank, generation=None):
        if self.is_between_rounds(rank):
            end = self.ends[rank]
            generation = end.generation + 1 if generation is None else generation
            end.enter(generation, self.posted[rank] // BUCKETS, list(self.ranks))

    def cut(self, rank):
        """Its link to another breaks; what was on its way on it is lost."""
        peer = (rank + 1) % len(self.ranks)
        if peer not in self.ends[rank].gone:
            self.wires.under_way[rank, peer].clear()
            self.wires.boxes[rank].append(Lost(peer))
            self.ends[rank].poll()
            self.cut_in = max(end.generation for end in self.ends)

    def deliver(self, rank, sender=None):
        """One message to a rank."""
        self.wires.deliver(1 - rank if sender is None else sender, rank)
        self.ends[rank].poll()

    def deliver_all(self):
        while any(self.wires.under_way.values()):  # a part leaves when the other end is ready
            self.wires.deliver_all()
            for end in self.ends:
                end.poll()

    def go_on(self, rounds):
        for _ in range(rounds):
            for rank in self.ranks:
                self.post_round(rank)
            self.deliver_all()
        for mine in self.exchanges:
            assert [e.outcome for e in list(mine.values())[-BUCKETS:]] == [D] * BUCKETS

    def come_to_rest(self):
        """All live on in one generation, a new one if links broke."""
        generation = max(end.generation for end in self.ends)
        generation += any(end.gone for end in self.ends)
        for rank in self.ranks:
            self.fail(rank)
            while self.posted[rank] % BUCKETS:
                self.post(rank)
        self.posted = [max(self.posted)] * len(self.ranks)
        for rank, end in enumerate(self.ends):
            if end.generation < generation:
                self.enter(rank, generation)
        self.deliver_all()
        if any(end.gone for end in self.ends):  # some heard only now that a link broke
            for rank in self.ranks:
                self.enter(rank, generation + 1)
            self.deliver_all()

    def check(self):
        """What one end counts the other has sent, and counts where both send; nothing hangs."""
        self.come_to_rest()
        self.go_on(8)
        for mine in self.exchanges:
            for key, exchange in mine.items():
                assert not exchange.open
                peer = exchange.peer
                if exchange.outcome is not D or peer is None or key[0] <= self.cut_in:
                    continue
                assert exchange.received.item() == 1000 * peer + exchange.at.round
                theirs = self.exchanges[peer][key]
                assert theirs.payload is None
                assert theirs.outcome is D or theirs.peer != exchange.peer
        for end in self.ends:
            end.close(0.0)


ACTS = ["post"] * 6 + ["void"] + ["deliver"] * 9 + ["meet", "meet", "resume", "resume", "fail"]


@pytest.mark.parametrize("schedule", [one_pair, symmetric, directed])
@pytest.mark.parametrize(
    "acts",
    [
        ACTS,
        [*ACTS, "enter", "cancel", "cancel"],
        [*ACTS, "enter", "enter", "cut"],
    ],
    ids=["one generation", "several, and exchanges are given up", "links break"],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_one_end_counts_both_do_whatever_comes_between(schedule, acts, seed):
    for script in range(20):
        random = Random(f"{seed} {script}")
        world = World(schedule, window=random.choice([1, 3]))
        for _ in range(random.choice([10, 20, 60, 150])):
            act, rank = random.choice(acts), random.choice(world.ranks)
            if act == "deliver":
                world.deliver(rank, random.choice([peer for peer in world.ranks if peer != rank]))
            else:
                getattr(world, act)(rank)
        world.check()
