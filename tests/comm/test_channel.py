"""What holds for exchanges, whatever transport moves them."""

import time

import pytest
import torch

from gossipgrad.comm import Outcome, Part
from support.waiting import quick, until

D, L, V, X = Outcome.DELIVERED, Outcome.LATE, Outcome.VOID, Outcome.DEAD_PEER


def part(value, size=4):
    return torch.full((size,), float(value))


def post(channel, peer, round=0, value=0.0, bucket=0, size=4, **options):
    return channel.post(round, bucket, part(value, size), send_to=peer, recv_from=peer, **options)


def test_both_parts_arrive(channels):
    a, b = channels()
    mine, theirs = post(a, 1, value=1), post(b, 0, value=2)
    assert (a.take(mine, 30.0), b.take(theirs, 30.0)) == (D, D)
    assert mine.received.tolist() == [2.0] * 4
    assert theirs.received.sub_(0.5).tolist() == [0.5] * 4  # it may be written
    assert not mine.open
    assert mine.finished_seconds >= mine.posted_seconds
    assert a.bytes_sent == a.bytes_received == 16


def test_a_part_that_is_here_before_the_post_is_taken_at_once(channels):
    a, b = channels()
    b_side = post(b, 0, value=7)
    until(lambda: a.poll() or a.early_bytes)
    mine = post(a, 1, value=1)
    assert mine.outcome is D
    assert mine.received.tolist() == [7.0] * 4
    assert b.take(b_side, 30.0) is D


def test_late_then_delivered_by_a_second_take(channels):
    a, b = channels()
    mine = post(a, 1)
    took = []

    def late():
        start = time.perf_counter()
        assert a.take(mine, 0.1) is L
        took.append(time.perf_counter() - start)
        return took[-1]

    quick(late, 0.2)
    assert min(took) >= 0.1
    assert mine.open
    post(b, 0, value=3)
    assert a.take(mine, 30.0) is D
    assert mine.received.tolist() == [3.0] * 4
    assert a.take(mine, 0.0) is D


def test_a_peer_that_left_is_dead_and_later_rounds_say_so_at_once(channels, leave):
    a, b = channels()
    done = post(a, 1), post(b, 0)
    assert (a.take(done[0], 30.0), b.take(done[1], 30.0)) == (D, D)
    mine = post(a, 1, round=1)
    leave(b)
    start = time.perf_counter()
    assert a.take(mine, 60.0) is X
    assert time.perf_counter() - start < 30.0
    assert a.gone == {1: "left"}
    later = post(a, 1, round=2)
    assert later.outcome is X
    assert later.ticket.done


def test_what_was_sent_before_leaving_counts_where_nothing_was_due_in_return(channels, leave):
    """Of a pair it would count on one end: the one that has left gets nothing any more."""
    a, b = channels()
    for round in range(2):
        b.post(round, 0, part(5), send_to=0, recv_from=None)
    until(lambda: a.poll() or a.early_bytes == 32)
    leave(b)
    until(lambda: a.poll() or a.gone == {1: "left"})
    mine = post(a, 1)
    assert mine.outcome is X
    assert mine.received is None
    takes = a.post(1, 0, part(0), send_to=None, recv_from=1)
    assert a.take(takes, 30.0) is D
    assert takes.received.tolist() == [5.0] * 4


def test_what_was_posted_before_its_partner_left_counts(channels, leave):
    a, b = channels()
    mine, theirs = post(a, 1, value=1), post(b, 0, value=5)
    assert b.take(theirs, 30.0) is D
    until(lambda: b._outbox.empty)
    leave(b)
    assert a.take(mine, 30.0) is D
    assert mine.received.tolist() == [5.0] * 4
    until(lambda: a.poll() or a.gone == {1: "left"})


@pytest.mark.parametrize("they_met", [True, False])
def test_a_peer_that_vanished_without_a_word_is_dead(channels, they_met):
    a, b = channels()
    if they_met:
        done = post(a, 1), post(b, 0)
        assert (a.take(done[0], 30.0), b.take(done[1], 30.0)) == (D, D)
    mine = post(a, 1, round=1)
    b.transport.close()
    start = time.perf_counter()
    assert a.take(mine, 60.0) is X
    assert time.perf_counter() - start < 30.0
    assert a.gone == {1: "was lost"}


def test_a_lost_peer_disturbs_no_other_link(channels):
    a, b, c = channels(3)
    first = post(a, 1), post(b, 0)
    assert (a.take(first[0], 30.0), b.take(first[1], 30.0)) == (D, D)
    b.transport.close()
    lost = post(a, 1, round=1)
    other = post(a, 2, round=2, value=1), post(c, 0, round=2, value=2)
    assert (a.take(other[0], 30.0), c.take(other[1], 30.0)) == (D, D)
    assert a.take(lost, 30.0) is X


def test_credits_void_a_further_round_and_name_it_to_the_partner(channels):
    a, b = channels(credits=2)
    first, second = post(a, 1, round=3, value=3), post(a, 1, round=5, value=5)
    third = post(a, 1, round=8, value=8)
    assert third.outcome is V
    assert third.ticket.done
    until(lambda: b.poll() or b.heard == 8)
    answers = [post(b, 0, round=r, value=r) for r in (3, 5, 8)]
    assert answers[2].outcome is V
    assert [b.take(x, 30.0) for x in answers[:2]] == [D, D]
    assert [a.take(x, 30.0) for x in (first, second)] == [D, D]
    assert first.received.tolist() == [3.0] * 4
    assert second.received.tolist() == [5.0] * 4


def test_a_round_voided_by_the_partner_ends_what_was_posted(channels):
    a, b = channels()
    mine = post(a, 1, round=4)
    b.void(4, 0)
    assert a.take(mine, 30.0) is V
    after = post(a, 1, round=5, value=1), post(b, 0, round=5, value=2)
    assert (a.take(after[0], 30.0), b.take(after[1], 30.0)) == (D, D)


def test_cancel_drops_the_part_should_it_come(channels):
    a, b = channels()
    mine = post(a, 1)
    a.cancel(mine)
    assert mine.outcome is V
    a.cancel(mine)
    assert b.take(post(b, 0), 30.0) is D
    after = post(a, 1, round=1, value=1), post(b, 0, round=1, value=9)
    assert a.take(after[0], 30.0) is D
    assert after[0].received.tolist() == [9.0] * 4
    assert not a.early_bytes


def test_a_partner_ahead_sees_rounds_past_the_fence_as_void(channels):
    a, b = channels(credits=8)
    pair = post(a, 1, round=0), post(b, 0, round=0)
    ahead = post(b, 0, round=1)
    came = {0: a.fence()}
    start = time.perf_counter()
    assert b.take(ahead, 60.0) is V
    assert time.perf_counter() - start < 30.0
    assert post(b, 0, round=2).outcome is V
    assert (a.take(pair[0], 30.0), b.take(pair[1], 30.0)) == (D, D)
    came[1] = b.fence()
    for channel in (a, b):
        channel.resume(came, 3)
    after = post(a, 1, round=3, value=1), post(b, 0, round=3, value=2)
    assert (a.take(after[0], 30.0), b.take(after[1], 30.0)) == (D, D)


def test_replan_goes_on_with_other_buckets(channels):
    a, b = channels()
    pair = post(a, 1), post(b, 0)
    assert (a.take(pair[0], 30.0), b.take(pair[1], 30.0)) == (D, D)
    for channel in (a, b):
        channel.replan([Part(torch.float64, 2)])
    x = a.post(1, 0, torch.ones(2).double(), send_to=1, recv_from=1)
    y = b.post(1, 0, torch.zeros(2).double(), send_to=0, recv_from=0)
    assert (a.take(x, 30.0), b.take(y, 30.0)) == (D, D)
    assert y.received.dtype == torch.float64


def test_all_buckets_of_a_round_come_whatever_their_order(channels):
    a, b = channels(sizes=(4, 2, 0))
    sizes = (4, 2, 0)
    mine = {i: post(a, 1, bucket=i, value=i, size=sizes[i]) for i in (0, 1, 2)}
    theirs = {i: post(b, 0, bucket=i, value=10 + i, size=sizes[i]) for i in (2, 1, 0)}
    for i in (1, 0, 2):
        assert a.take(mine[i], 30.0) is D
        assert b.take(theirs[i], 30.0) is D
        assert mine[i].received.tolist() == [10.0 + i] * sizes[i]


def test_rounds_of_a_link_are_told_apart_and_keep_their_order(channels):
    a, b = channels(credits=10)
    sent = [post(b, 0, round=r, value=r) for r in range(10)]
    mine = [post(a, 1, round=r, value=-r) for r in range(10)]
    for r in reversed(range(10)):
        assert a.take(mine[r], 30.0) is D
        assert mine[r].received.tolist() == [float(r)] * 4
    assert [b.take(x, 30.0) for x in sent] == [D] * 10


def test_directed_schedules(channels):
    ends = channels(3)
    mine = [
        c.post(0, 0, part(r), send_to=(r - 1) % 3, recv_from=(r + 1) % 3)
        for r, c in enumerate(ends)
    ]
    for r, channel in enumerate(ends):
        assert channel.take(mine[r], 30.0) is D
        assert mine[r].received.tolist() == [float((r + 1) % 3)] * 4


def test_one_sided_rounds(channels):
    a, b = channels()
    gives = a.post(0, 0, part(6), send_to=1, recv_from=None)
    assert gives.outcome is D
    assert gives.received is None
    takes = b.post(0, 0, part(0), send_to=None, recv_from=0)
    assert b.take(takes, 30.0) is D
    assert takes.received.tolist() == [6.0] * 4


def test_a_directed_rank_still_gives_when_its_source_is_dead(channels):
    a, b, c = channels(3)
    b.transport.close()
    assert a.take(a.post(0, 0, part(1), send_to=2, recv_from=1), 30.0) is X
    assert a.post(1, 0, part(2), send_to=2, recv_from=1).outcome is X
    takes = c.post(1, 0, part(0), send_to=None, recv_from=0)
    assert c.take(takes, 30.0) is D
    assert takes.received.tolist() == [2.0] * 4


def test_a_posted_buffer_is_not_written_before_its_ticket_is_done(channels):
    size = 1 << 18
    a, b = channels(sizes=(size,), credits=4)
    buffers = [part(r, size) for r in range(4)]
    mine = [a.post(r, 0, buffers[r], send_to=1, recv_from=None) for r in range(4)]
    theirs = [b.post(r, 0, part(0, size), send_to=None, recv_from=0) for r in range(4)]
    for r in range(4):
        until(lambda r=r: b.poll() or mine[r].ticket.done)
        buffers[r].fill_(-1.0)
    for r in range(4):
        assert b.take(theirs[r], 30.0) is D
        assert theirs[r].received.eq(r).all()


def test_tickets_of_a_dead_peer_are_let_go(channels):
    size = 1 << 20
    a, b = channels(sizes=(size,), credits=9)
    mine = [post(a, 1, round=r, size=size) for r in range(6)]
    b.transport.close()
    for exchange in mine:
        assert a.take(exchange, 30.0) is X
    until(lambda: all(exchange.ticket.done for exchange in mine))
    assert post(a, 1, round=9, size=size).ticket.done


def test_early_parts_of_a_lost_peer_are_freed(channels):
    a, b = channels()
    a.void(0, 1)  # opens its link, and so sees it break
    post(b, 0, round=5)
    until(lambda: a.poll() or a.early_bytes == 16)
    b.transport.close()
    until(lambda: a.poll() or a.gone)
    assert a.early_bytes == 0
