"""Three ranks on schedules of both kinds, through collectives that fail and new generations."""

from random import Random

import pytest
import torch

from gossipgrad.comm import Channel, Outcome, Part
from support.links import RUN
from support.wires import Wires

D = Outcome.DELIVERED
RANKS = range(3)


def symmetric(rank, round):
    """Pairs in turn; the third rank has no partner."""
    pair = round % 3, (round + 1) % 3
    peer = sum(pair) - rank if rank in pair else None
    return peer, peer


def directed(rank, round):
    """A ring, now this way round and now that."""
    step = 1 + round % 2
    return (rank + step) % 3, (rank - step) % 3


class World:
    """Ranks that each do one thing after the other, while messages come in any order of links."""

    def __init__(self, schedule, credits):
        self.schedule, self.wires = schedule, Wires(3)
        plan = [Part(torch.float64, 1)]
        self.ends = [
            Channel(self.wires.transport(rank), run=RUN, plan=plan, credits=credits)
            for rank in RANKS
        ]
        self.next_round = [0, 0, 0]
        self.posted = [{}, {}, {}]  # generation, epoch and round: the exchange
        self.fences = [None, None, None]  # while it is in a collective
        self.came = [None, None, None]  # of the collective that all are in now
        self.outcome = [None, None, None]

    def post(self, rank):
        if self.fences[rank] is not None:
            return
        round, end = self.next_round[rank], self.ends[rank]
        self.next_round[rank] += 1
        send_to, recv_from = self.schedule(rank, round)
        payload = torch.full((1,), float(1000 * rank + round), dtype=torch.float64)
        exchange = end.post(round, 0, payload, send_to=send_to, recv_from=recv_from)
        self.posted[rank][end.generation, end.epoch, round] = exchange

    def void(self, rank):
        if self.fences[rank] is None:
            round = self.next_round[rank]
            self.next_round[rank] += 1
            self.ends[rank].void(round, self.schedule(rank, round)[0])

    def deliver(self, rank, sender):
        if sender != rank:
            self.wires.deliver(sender, rank)
            self.ends[rank].poll()

    def fence(self, rank):
        if self.fences[rank] is None:
            self.fences[rank] = self.came[rank] = self.ends[rank].fence()
            if None not in self.came and len({end.generation for end in self.ends}) == 1:
                found = dict(enumerate(self.came)), max(self.next_round)
                self.outcome, self.came = [found] * 3, [None] * 3

    def resume(self, rank):
        if self.outcome[rank] is not None:
            self.ends[rank].resume(*self.outcome[rank])
            self.next_round[rank] = self.outcome[rank][1]
            self.fences[rank] = self.outcome[rank] = None

    def abort(self, rank):
        if self.fences[rank] is not None:
            self.ends[rank].abort()
            self.fences[rank] = self.came[rank] = self.outcome[rank] = None

    def enter(self, rank):
        if self.fences[rank] is None:
            end = self.ends[rank]
            end.enter(end.generation + 1, self.next_round[rank], list(RANKS))

    def settle(self):
        self.wires.deliver_all()
        for end in self.ends:
            end.poll()

    def check_pairs(self):
        for rank in RANKS:
            for (generation, epoch, round), exchange in self.posted[rank].items():
                if exchange.outcome is not D or exchange.recv_from is None:
                    continue
                peer = exchange.recv_from
                theirs = self.posted[peer].get((generation, epoch, round))
                assert theirs is not None, "it has sent nothing"
                assert exchange.received.item() == 1000 * peer + round
                if exchange.send_to == peer:
                    assert theirs.outcome is D, (rank, peer, generation, epoch, round)

    def go_on(self):
        """All live on: what follows counts, and nothing is open any more."""
        last = max(end.generation for end in self.ends)
        self.next_round = [max(self.next_round)] * 3
        for rank, end in enumerate(self.ends):
            self.abort(rank)
            if end.generation < last:
                end.enter(last, self.next_round[rank], list(RANKS))
        for _ in range(9):
            for rank in RANKS:
                self.post(rank)
            self.settle()
        last = [e.outcome for mine in self.posted for e in list(mine.values())[-3:]]
        assert last == [D] * 9
        assert not any(e.open for mine in self.posted for e in mine.values())


ACTS = ["post"] * 4 + ["void"] + ["deliver"] * 9 + ["fence", "resume", "resume", "abort"]


@pytest.mark.parametrize("schedule", [symmetric, directed])
@pytest.mark.parametrize("acts", [ACTS, [*ACTS, "enter"]], ids=["one generation", "several"])
@pytest.mark.parametrize("seed", range(6))
def test_what_one_end_counts_both_do(schedule, acts, seed):
    for script in range(12):
        random = Random(f"{seed} {script}")
        world = World(schedule, credits=random.choice([1, 3]))
        for _ in range(random.choice([10, 20, 60, 150])):
            act, rank = random.choice(acts), random.randrange(3)
            arguments = (rank, random.randrange(3)) if act == "deliver" else (rank,)
            getattr(world, act)(*arguments)
        world.go_on()
        world.check_pairs()
        for end in world.ends:
            end.close(0.0)
