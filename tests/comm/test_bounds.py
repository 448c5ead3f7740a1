"""What a channel remembers does not grow with the rounds."""

import torch

from gossipgrad.comm import Outcome
from support.waiting import until

ROUNDS = 200


def part(value):
    return torch.full((4,), float(value))


def give_and_await(channel, round):
    """To one peer, from the other."""
    return channel.post(round, 0, part(round), send_to=2, recv_from=1)


def test_rounds_of_a_silent_source_are_forgotten_and_its_old_parts_are_dropped(channels):
    a, b, c = channels(3)
    first = give_and_await(a, 0)
    for round in range(1, ROUNDS):
        assert give_and_await(a, round).outcome is Outcome.VOID
        c.poll()
    ledger = a._ledgers[1]
    assert len(ledger.cancelled) == 1
    # It speaks after all: what is open counts, what was given up on does not come back.
    for round in (0, 1, ROUNDS - 1):
        b.post(round, 0, part(-round), send_to=0, recv_from=None)
    assert a.take(first, 30.0) is Outcome.DELIVERED
    until(lambda: a.poll() or ledger.latest == ROUNDS - 1)
    assert not ledger.early
    b.post(ROUNDS, 0, part(7), send_to=0, recv_from=None)
    next_one = give_and_await(a, ROUNDS)
    assert a.take(next_one, 30.0) is Outcome.DELIVERED
    assert next_one.received.tolist() == [7.0] * 4


def test_rounds_of_a_source_that_is_gone_are_forgotten(channels):
    a, b, c = channels(3)
    b.transport.close()
    assert a.take(give_and_await(a, 0), 30.0) is Outcome.DEAD_PEER
    for round in range(1, ROUNDS):
        assert give_and_await(a, round).outcome is Outcome.DEAD_PEER
        c.poll()
    assert len(a._ledgers[1].cancelled) == 1
