"""Messages whose buffer is not filled yet, and those behind and beside them."""

import threading
import time

import pytest
import torch

from gossipgrad.comm import Channel, Hub, Outcome, Part
from gossipgrad.errors import GossipError
from support.links import RUN
from support.waiting import quick, until

LATE_SECONDS = 2.0


@pytest.fixture
def ranks():
    """Channels of four ranks in one process; four rounds may be open on a link."""
    hub = Hub(4)
    plan = [Part(torch.float32, 4)]
    made = [Channel(hub.transport(rank), run=RUN, plan=plan, credits=4) for rank in range(4)]
    yield made
    for channel in made:
        channel.close(0.0)


def post(channel, peer, round=0, value=0.0, **options):
    values = torch.full((4,), value)
    return channel.post(round, 0, values, send_to=peer, recv_from=peer, **options)


def senders():
    return [t for t in threading.enumerate() if t.name == "gossipgrad-sender"]


def test_order_on_a_link_holds_behind_a_slow_buffer(ranks):
    a, b, *_ = ranks
    go = threading.Event()
    mine = [post(a, 1, 0, 0.0)]
    mine.append(post(a, 1, 1, 1.0, ready=lambda: go.wait(30) and None))
    mine.append(post(a, 1, 2, 2.0))
    a.void(3, 1)
    theirs = [post(b, 0, round) for round in range(4)]
    assert [b.take(one, 0.05) for one in theirs[:3]] == [Outcome.DELIVERED, *[Outcome.LATE] * 2]
    assert [one.ticket.done for one in mine] == [True, False, False]
    go.set()
    assert [b.take(one, 30.0) for one in theirs] == [*[Outcome.DELIVERED] * 3, Outcome.VOID]
    assert [one.received[0].item() for one in theirs[:3]] == [0.0, 1.0, 2.0]
    until(lambda: all(one.ticket.done for one in mine))


def test_one_late_link_holds_up_no_other(ranks):
    """Ranks 0 and 1 wait for a buffer; all other pairs, those of 0 and 1 too, exchange."""

    def others_seconds():
        at, late = next(rounds), threading.Event()
        slow = [
            post(ranks[0], 1, at, ready=lambda: late.wait(LATE_SECONDS) and None),
            post(ranks[1], 0, at, ready=lambda: late.wait(LATE_SECONDS) and None),
        ]
        start = time.perf_counter()
        for one, other in ((0, 2), (1, 3), (2, 3), (0, 3), (1, 2)):
            ends = post(ranks[one], other, at), post(ranks[other], one, at)
            for rank, end in zip((one, other), ends, strict=True):
                assert ranks[rank].take(end, 30.0) is Outcome.DELIVERED
            ranks[one].void(at + 1, other)  # a word is held up by as little
            assert ranks[other].take(post(ranks[other], one, at + 1), 30.0) is Outcome.VOID
        seconds = time.perf_counter() - start
        assert all(end.open for end in slow)
        late.set()
        for rank, end in enumerate(slow):
            assert ranks[rank].take(end, 30.0) is Outcome.DELIVERED
        return seconds

    rounds = iter(range(0, 100, 2))
    quick(others_seconds, LATE_SECONDS / 4)


def test_there_is_a_thread_for_links_that_wait_and_none_is_left_at_the_end(ranks):
    before = len(senders())
    a, b, *_ = ranks
    for round in range(3):
        post(a, 2, round)
        post(a, 3, round)
    assert len(senders()) == before
    for round in range(3):
        mine = post(a, 1, round, ready=lambda: None)
        post(b, 0, round)
        assert a.take(mine, 30.0) is Outcome.DELIVERED
    assert len(senders()) <= before + 1
    for channel in ranks:
        channel.close()
    until(lambda: len(senders()) <= before)


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("device lost"), "device lost"), (GossipError("killed"), "^killed$")],
)
def test_a_buffer_that_cannot_be_filled_is_an_error_and_its_memory_is_free(ranks, error, text):
    def fail():
        go.wait(30)
        raise error

    a, go = ranks[0], threading.Event()
    mine = [post(a, 1, 0, ready=fail), post(a, 1, 1)]
    go.set()
    until(lambda: all(one.ticket.done for one in mine))
    with pytest.raises(GossipError, match=text):
        a.take(mine[0], 30.0)
    with pytest.raises(GossipError, match=text):
        post(a, 2)
    a.close()


def test_closing_beside_a_stuck_buffer_ends_in_time(ranks):
    a, *_ = ranks
    stuck = threading.Event()
    post(a, 1, ready=lambda: stuck.wait(60) and None)
    start = time.perf_counter()
    a.close(0.1)
    assert time.perf_counter() - start < 30.0
    stuck.set()


def test_a_channel_sends_when_the_buffer_is_ready(channels):
    a, b = channels()
    go = threading.Event()
    payload = torch.zeros(4)
    mine = a.post(0, 0, payload, send_to=1, recv_from=1, ready=lambda: go.wait(30) and None)
    theirs = b.post(0, 0, torch.ones(4), send_to=0, recv_from=0)
    assert b.take(theirs, 0.05) is Outcome.LATE
    payload.fill_(5.0)
    go.set()
    assert b.take(theirs, 30.0) is Outcome.DELIVERED
    assert theirs.received.tolist() == [5.0] * 4
    assert a.take(mine, 30.0) is Outcome.DELIVERED


def test_a_peer_that_leaves_between_post_and_send_holds_no_ticket(channels):
    a, b = channels()
    go = threading.Event()
    mine = a.post(0, 0, torch.zeros(4), send_to=1, recv_from=1, ready=lambda: go.wait(30) and None)
    b.transport.close()
    assert a.take(mine, 30.0) is Outcome.DEAD_PEER
    assert not mine.ticket.done
    go.set()
    until(lambda: mine.ticket.done)
    a.close()
