"""Messages whose buffer is not filled yet."""

import threading
import time

import pytest
import torch

from gossipgrad.comm import Outcome, Sent
from gossipgrad.comm._sender import DeferredSender
from gossipgrad.errors import GossipError
from support.waiting import until


def test_order_holds_behind_a_slow_buffer():
    sent = []
    sender = DeferredSender(lambda peer, header, payload: sent.append(header) or Sent())
    go = threading.Event()
    assert sender.send(0, b"0", None, None).done
    slow = sender.send(0, b"1", torch.zeros(1), lambda: go.wait(30) and None)
    after = sender.send(0, b"2", None, None)
    time.sleep(0.05)
    assert sent == [b"0"]
    assert not slow.done
    assert not after.done
    go.set()
    until(lambda: slow.done and after.done)
    assert sent == [b"0", b"1", b"2"]
    sender.drain(30.0)
    assert not [t for t in threading.enumerate() if t.name == "gossipgrad-sender"]


def test_a_failure_is_raised_by_the_next_send_and_tickets_are_let_go():
    sender = DeferredSender(lambda peer, header, payload: Sent())

    def fail():
        raise RuntimeError("device lost")

    tickets = [sender.send(0, b"", None, fail), sender.send(0, b"", None, None)]
    until(lambda: all(t.done for t in tickets))
    with pytest.raises(GossipError, match="a message could not be sent: device lost"):
        sender.send(0, b"", None, None)
    sender.drain(30.0)


def test_an_error_of_ours_is_raised_as_it_is():
    def transmit(peer, header, payload):
        raise GossipError("killed")

    sender = DeferredSender(transmit)
    ticket = sender.send(0, b"", None, lambda: None)
    until(lambda: ticket.done)
    with pytest.raises(GossipError, match=r"^killed$"):
        sender.send(0, b"", None, None)
    sender.drain(30.0)


def test_draining_a_stuck_buffer_ends_in_time():
    sender = DeferredSender(lambda peer, header, payload: Sent())
    stuck = threading.Event()
    sender.send(0, b"", None, lambda: stuck.wait(60) and None)
    start = time.perf_counter()
    sender.drain(0.1)
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
    b._transport.close()
    assert a.take(mine, 30.0) is Outcome.DEAD_PEER
    assert not mine.ticket.done
    go.set()
    until(lambda: mine.ticket.done)
    a.close()
