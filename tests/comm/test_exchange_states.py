"""All orders of what two or three ranks may do with their exchanges: both ends agree on each."""

import pytest
import torch

from gossipgrad.comm import Ticket
from gossipgrad.comm._exchange import Exchange, Ledger, Outcome, Position
from support.wires import one_pair, symmetric

PART = torch.zeros(1)


class Rank:
    """One rank's ledgers, and its exchanges by position."""

    def __init__(self, peers, window):
        self.ledgers = {peer: Ledger() for peer in peers}
        self.exchanges = {}
        self.generation = self.round = 0
        self.window, self.is_dead, self.down = window, False, set()

    @property
    def at(self):
        return Position(self.generation, 0, self.round)


class World:
    """Ranks, and what is under way between them; `acts` are all that may happen next."""

    def __init__(self, schedule, world_size, rounds, window):
        self.schedule, self.rounds = schedule, rounds
        ranks = range(world_size)
        self.ranks = [Rank([p for p in ranks if p != rank], window) for rank in ranks]
        self.under_way = {(a, b): [] for a in ranks for b in ranks if a != b}
        self.deaths, self.generations, self.voids, self.cancels = 1, 1, 1, 1

    def key(self):
        """Equal for worlds with an equal future."""
        ranks = [
            (
                rank.generation,
                rank.round,
                rank.is_dead,
                tuple((at, e.outcome.value, e.ticket.is_kept) for at, e in rank.exchanges.items()),
                tuple(
                    (
                        peer,
                        tuple((e.at, e.sends, e.receives, e.is_agreed) for e in each.all_posted()),
                        tuple(sorted(each.awaited)),
                        each.latest,
                        each.past,
                        peer in rank.down,
                    )
                    for peer, each in rank.ledgers.items()
                ),
            )
            for rank in self.ranks
        ]
        left = self.deaths, self.generations, self.voids, self.cancels
        return tuple(ranks), tuple((k, tuple(v)) for k, v in self.under_way.items()), left

    def acts(self):
        for number, rank in enumerate(self.ranks):
            if rank.is_dead:
                continue
            for sender in rank.ledgers:
                if self.under_way[sender, number]:
                    yield "deliver", number, sender
            if rank.round < self.rounds:
                yield "post", number
                if self.voids:
                    yield "void", number
            if self.generations:
                yield "enter", number
            if self.deaths:
                yield "die", number
            if self.cancels and any(exchange.open for exchange in rank.exchanges.values()):
                yield "cancel", number

    def send(self, sender, receiver, kind, at):
        if not self.ranks[receiver].is_dead and not self.ranks[sender].is_dead:
            self.under_way[sender, receiver].append((kind, at))

    def leave(self, number, peer, exchange):
        if exchange is not None and exchange.sends:
            self.send(number, peer, "part", exchange.at)
            self.ranks[number].ledgers[peer].leave(exchange)
            exchange.ticket.done = True

    def post(self, number):
        rank = self.ranks[number]
        send_to, recv_from = self.schedule(number, rank.round)
        at = rank.at
        rank.round += 1
        if send_to is None:
            return
        receiving = sending = Exchange(at, 0, recv_from, True, Ticket())
        if send_to != recv_from:
            sending = Exchange(at, 0, send_to, False, receiving.ticket)
        sending.sends, sending.payload = True, PART
        rank.exchanges[at] = receiving
        for exchange in {receiving, sending}:
            peer, sends = exchange.peer, exchange.sends
            ledger = rank.ledgers[peer]
            if ledger.post(exchange, window=rank.window, is_alive=peer not in rank.down):
                self.send(number, peer, "READY", at)
                if (at, 0) in ledger.awaited:
                    self.leave(number, peer, ledger.agree(at, 0))
            elif sends:
                self.give_up(number, peer, at)

    def give_up(self, number, peer, at):
        ledger = self.ranks[number].ledgers[peer]
        if peer not in self.ranks[number].down and at > ledger.told:
            ledger.told = at
            ledger.prune(before=at.next)
            self.send(number, peer, "VOID", at)

    def void(self, number):
        rank = self.ranks[number]
        self.voids -= 1
        send_to, _ = self.schedule(number, rank.round)
        if send_to is not None:
            self.give_up(number, send_to, rank.at)
        rank.round += 1

    def cancel(self, number):
        """A late exchange is given up while its peer has not said READY."""
        rank = self.ranks[number]
        self.cancels -= 1
        for exchange in rank.exchanges.values():
            if not exchange.open:
                continue
            ledger = rank.ledgers[exchange.peer]
            if not exchange.is_agreed and ledger.cancel(exchange):
                self.send(number, exchange.peer, "WITHDRAW", exchange.at)

    def enter(self, number):
        rank = self.ranks[number]
        self.generations -= 1
        self.move(number, rank.generation + 1)

    def move(self, number, generation):
        rank = self.ranks[number]
        if generation <= rank.generation:
            return
        rank.generation = generation
        for peer, ledger in rank.ledgers.items():
            ledger.prune(before=Position(generation, 0, 0))
            self.send(number, peer, "FENCE", rank.at)

    def die(self, number):
        self.deaths -= 1
        self.ranks[number].is_dead = True
        for peer in self.ranks[number].ledgers:
            self.under_way[number, peer].append(("LOST", None))
            self.under_way[peer, number].clear()

    def deliver(self, number, sender):
        kind, at = self.under_way[sender, number].pop(0)
        ledger = self.ranks[number].ledgers[sender]
        if kind == "LOST":
            ledger.end()
            self.ranks[number].down.add(sender)
        elif kind == "WITHDRAW":
            ledger.take_back(at, 0)
        elif kind == "part":
            ledger.deliver(at, 0, PART)
        else:
            ledger.advance(at.next if kind == "VOID" else at)
            if kind == "READY":
                self.leave(number, sender, ledger.agree(at, 0))

    def come_to_rest(self):
        """All that is under way arrives; every rank comes to the last round and generation."""
        last = max(rank.generation for rank in self.ranks)
        for number, rank in enumerate(self.ranks):
            if not rank.is_dead:
                rank.round = self.rounds
                self.move(number, last)
                for peer, ledger in rank.ledgers.items():  # a later round, which names itself
                    at = Position(last, 0, self.rounds)
                    ledger.prune(before=at)
                    self.send(number, peer, "FENCE", at)
        while any(self.under_way.values()):
            for (sender, receiver), queue in self.under_way.items():
                while queue and not self.ranks[receiver].is_dead:
                    self.deliver(receiver, sender)
                if self.ranks[receiver].is_dead:
                    queue.clear()

    def check(self):
        for number, rank in enumerate(self.ranks):
            if rank.is_dead:
                continue
            for at, exchange in rank.exchanges.items():
                assert not exchange.open, (number, at, "waits for ever")
                assert exchange.ticket.done, (number, at, "a part is held for ever")
                peer = exchange.peer
                if exchange.outcome is not Outcome.DELIVERED or self.ranks[peer].is_dead:
                    continue
                theirs = self.ranks[peer].exchanges[at]
                assert not theirs.ticket.is_kept, (number, at, "counts what was never sent")
                if theirs.peer == number:
                    assert theirs.outcome is Outcome.DELIVERED, (
                        number,
                        at,
                        "counts at one end alone",
                    )


def ring(rank, round):
    return (rank + 1) % 3, (rank - 1) % 3


def replayed(script, *setting):
    world = World(*setting)
    for act, *arguments in script:
        getattr(world, act)(*arguments)
    return world


@pytest.mark.parametrize(
    ("schedule", "world_size", "window", "depth"),
    [(one_pair, 2, 1, 7), (one_pair, 2, 2, 6), (symmetric, 3, 1, 5), (ring, 3, 1, 4)],
)
def test_both_ends_agree_whatever_the_order(schedule, world_size, window, depth):
    setting = schedule, world_size, 2, window
    seen, layer = {World(*setting).key()}, [()]
    for _ in range(depth):
        following = []
        for script in layer:
            for act in [*replayed(script, *setting).acts()]:
                after = replayed((*script, act), *setting)
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    following.append((*script, act))
                    after.come_to_rest()
                    after.check()
        layer = following
    print(f"{schedule.__name__}, window {window}, {depth} acts: {len(seen)} states")
    assert len(seen) > 100
