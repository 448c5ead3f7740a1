"""Links of a ring in one thread, where a test says what arrives when."""

from collections import defaultdict, deque

import torch

from gossipgrad.comm import Lost, Received

__all__ = ["Wires", "one_pair", "symmetric"]


def one_pair(rank, round):
    """The partners of two ranks: whom a rank sends to, and receives from."""
    return 1 - rank, 1 - rank


def symmetric(rank, round):
    """Of three ranks, pairs in turn; the third rank has no partner."""
    pair = round % 3, (round + 1) % 3
    peer = sum(pair) - rank if rank in pair else None
    return peer, peer


class Wires:
    """What is under way between any two ranks, in order; nothing arrives before `deliver`."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.under_way = defaultdict(deque)
        self.boxes = [deque() for _ in range(world_size)]
        self.dead = set()

    def transport(self, rank):
        return _End(self, rank)

    def deliver(self, sender, receiver, count=1):
        queue = self.under_way[sender, receiver]
        for _ in range(min(count, len(queue))):
            message = queue.popleft()
            if receiver not in self.dead:
                self.boxes[receiver].append(message)

    def deliver_all(self):
        for sender, receiver in list(self.under_way):
            self.deliver(sender, receiver, len(self.under_way[sender, receiver]))

    def kill(self, rank):
        """What has not left a killed rank never does; all others find it gone, in time."""
        self.dead.add(rank)
        for peer in range(self.world_size):
            if peer != rank:
                self.under_way[rank, peer] = deque([Lost(rank)])

    def leave(self, rank):
        """What a rank said before it left still arrives."""
        self.dead.add(rank)
        for peer in range(self.world_size):
            if peer != rank:
                self.under_way[rank, peer].append(Lost(rank))


class _End:
    by_hand = True

    def __init__(self, wires, rank):
        self.wires, self.rank, self.world_size = wires, rank, wires.world_size

    def open(self, peer):
        pass

    def send(self, peer, header, payload=None, ticket=None):
        if self.rank not in self.wires.dead:
            body = None if payload is None else payload.view(torch.uint8).clone()
            self.wires.under_way[self.rank, peer].append(Received(header, body))
        if ticket is not None:
            ticket.done = True

    def receive(self, timeout_seconds):
        box = self.wires.boxes[self.rank]
        return [box.popleft() for _ in range(len(box))]  # another thread may append

    def forget(self, peer):
        pass

    def close(self, linger_seconds=0.0):
        self.wires.leave(self.rank)
