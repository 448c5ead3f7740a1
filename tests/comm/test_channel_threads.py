"""Threads around a channel: those that listen, buffers filled later, and how they end."""

import threading

import pytest
import torch

from gossipgrad.comm import Channel, Hub, Outcome, Part
from gossipgrad.errors import GossipError
from support.links import RUN, ours, post, until_none_but
from support.waiting import HANG_SECONDS, until

D, L, V = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID


@pytest.fixture
def ranks():
    """Channels of four ranks in one process; four rounds may be open on a link."""
    hub, before = Hub(4), {*ours()}
    plan = [Part(torch.float32, 4)]
    made = [Channel(hub.transport(rank), run=RUN, plan=plan, window=4) for rank in range(4)]
    yield made
    for channel in made:
        channel.close(0.0)
    until_none_but(before)


def test_order_on_a_link_holds_behind_a_slow_buffer(ranks):
    a, b, *_ = ranks
    go = threading.Event()
    mine = [post(a, 1, 0, 0.0)]
    mine.append(post(a, 1, 1, 1.0, is_filled=go.is_set))
    mine.append(post(a, 1, 2, 2.0))
    a.void(3, 1)
    theirs = [post(b, 0, round) for round in range(4)]
    assert b.take(theirs[0], HANG_SECONDS) is D
    assert [b.take(one, 0.05) for one in theirs[1:3]] == [L, L]
    until(lambda: mine[0].ticket.done)
    assert not any(one.ticket.done for one in mine[1:])
    go.set()
    assert [b.take(one, HANG_SECONDS) for one in theirs] == [D, D, D, V]
    assert [one.received[0].item() for one in theirs[:3]] == [0.0, 1.0, 2.0]
    until(lambda: all(one.ticket.done for one in mine))


def test_one_late_link_holds_up_no_other(ranks):
    """Ranks 0 and 1 wait for a buffer; all other pairs, those of 0 and 1 too, exchange."""

    late = threading.Event()
    slow = [post(ranks[rank], 1 - rank, is_filled=late.is_set) for rank in (0, 1)]
    for one, other in ((0, 2), (1, 3), (2, 3), (0, 3), (1, 2)):
        ends = post(ranks[one], other), post(ranks[other], one)
        for rank, end in zip((one, other), ends, strict=True):
            assert ranks[rank].take(end, HANG_SECONDS) is D
    assert all(end.open for end in slow)
    late.set()
    assert [ranks[rank].take(end, HANG_SECONDS) for rank, end in enumerate(slow)] == [D, D]


@pytest.mark.parametrize("error", [RuntimeError("device lost"), GossipError("device lost")])
def test_a_buffer_that_cannot_be_filled_is_an_error_and_its_memory_is_free(ranks, error):
    def fail():
        if go.is_set():
            raise error
        return False

    a, go = ranks[0], threading.Event()
    mine = [post(a, 1, 0, is_filled=fail), post(a, 1, 1)]
    for round in range(2):
        post(ranks[1], 0, round)
    go.set()
    until(lambda: all(one.ticket.done for one in mine))
    for fails in (lambda: a.take(mine[0], HANG_SECONDS), lambda: post(a, 2)):
        with pytest.raises(GossipError, match="device lost"):
            fails()
