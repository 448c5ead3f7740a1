"""What each transport must stand by itself: strangers, broken links, queues that are full."""

import socket

import pytest
import torch
import zmq

from gossipgrad.comm import (
    Channel,
    Header,
    Kind,
    Outcome,
    Part,
    ZeroMQTransport,
    _zeromq,
    _zeromq_link,
)
from gossipgrad.errors import GossipError
from support.links import RUN, make_transports, ours, until_none_but
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

D, V, X = Outcome.DELIVERED, Outcome.VOID, Outcome.DEAD_PEER
GOOD = {"kind": Kind.DATA, "run": RUN, "sender": 1, "round": 0, "dtype": torch.float32}


def post(channel, peer, round=0, value=0.0):
    payload = torch.full((4,), float(value))
    return channel.post(round, 0, payload, send_to=peer, recv_from=peer)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({"run": bytes(16)}, 16),
        ({"sender": 0}, 16),
        ({"sender": 2}, 16),
        ({"dtype": torch.bfloat16}, 16),
        ({"dtype": None}, 16),
        ({"size_bytes": 8}, 16),
        ({"size_bytes": 16}, 8),
        ({"size_bytes": 20}, 20),
        ({"size_bytes": 16}, None),
        ({"bucket": 1}, 16),
        ({"round": -1}, 16),
        ({"kind": Kind.VOID, "dtype": None, "size_bytes": 0}, 4),
        ({"kind": Kind.LEAVE, "run": bytes(16), "dtype": None, "size_bytes": 0}, None),
    ],
)
def test_messages_that_do_not_fit_the_plan_are_dropped_and_counted(channels, changed, size):
    a, b = channels()
    header = Header(**({"size_bytes": 16} | GOOD | changed))
    payload = None if size is None else torch.zeros(size, dtype=torch.uint8)
    mine = post(a, 1)
    b.transport.send(0, header.pack(), payload)
    until(lambda: a.poll() or a.refused == 1)
    assert mine.open
    assert a.gone == {}
    theirs = post(b, 0, value=2)
    assert (a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)) == (D, D)
    assert mine.received.tolist() == [2.0] * 4


def test_garbage_over_a_link_is_dropped_and_disturbs_nobody_else(monkeypatch):
    ends = run_ranks(3, lambda rank, group: ZeroMQTransport(group, max_payload_bytes=1 << 16))
    a, b, _ = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    good = Header(**GOOD, size_bytes=16).pack()
    with socket.create_connection(
        ("127.0.0.1", int(ends[0].introduction[0].split(":")[-1]))
    ) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1 << 10))
    ends[2].open(0)
    link = ends[2]._links[0]
    for number, frames in enumerate(
        [[b""], [b"hello"], [good, bytes(16), b"more"], [bytes(1 << 15)], [good[:-1], bytes(16)]]
    ):
        link.socket.send_multipart(frames)
        until(lambda number=number: a.poll() or a.refused == number + 1)
    monkeypatch.setattr(_zeromq, "_RECONNECT_MILLISECONDS", 60_000)
    ends[2].receive(0.0)
    link.socket.send(bytes(1 << 20))  # above the limit: its connection is cut
    until(lambda: a.poll() or ends[2].receive(0.0) or link.down_since is not None)
    pair = post(a, 1), post(b, 0)
    assert (a.take(pair[0], HANG_SECONDS), b.take(pair[1], HANG_SECONDS)) == (D, D)
    assert a.gone == b.gone == {}
    for end in ends:
        end.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_payload_of_the_limit_arrives_and_none_above_it(encrypt, secret):
    """Encrypted ones are longer on the wire, where ZeroMQ looks."""
    size, events = (1 << 16) + 16, []
    ends = run_ranks(
        2, lambda rank, group: ZeroMQTransport(group, max_payload_bytes=size, encrypt=encrypt)
    )
    ends[0].send(1, bytes(1 << 14), torch.ones(size, dtype=torch.uint8))
    until(lambda: events.extend(ends[1].receive(0.01)) or events)
    assert events[0].header == bytes(1 << 14)
    assert events[0].payload.eq(1).all()
    assert events[0].payload.numel() == size
    with pytest.raises(ValueError, match=f"is above max_payload_bytes={size}: use smal"):
        ends[0].send(1, b"header", torch.zeros(size + 1, dtype=torch.uint8))
    for end in ends:
        end.close()


def test_a_failed_start_leaves_no_socket(monkeypatch):
    contexts = []
    make = zmq.Context

    def context():
        contexts.append(make())
        return contexts[-1]

    monkeypatch.setattr(zmq, "Context", context)
    with pytest.raises(ValueError, match=r"cannot listen on bind='192\.0\.2\.1'.*of this host"):
        run_ranks(2, lambda rank, group: ZeroMQTransport(group, bind="192.0.2.1"))
    with pytest.raises(ValueError, match=r"bind='0\.0\.0\.0' is every interface.*10\.0\.0\.7"):
        run_ranks(2, lambda rank, group: ZeroMQTransport(group, bind="0.0.0.0"))

    def one_dies(rank, group):
        if rank == 1:
            group.close()
            return None
        with pytest.raises(GossipError):
            return ZeroMQTransport(group)

    run_ranks(2, one_dies)
    assert len(contexts) >= 3
    assert all(c.closed for c in contexts)


def test_a_link_that_broke_one_way_is_told_and_made_anew_in_the_next_generation():
    """Until then both ends see the other as gone, and neither hangs."""
    ends = make_transports("zeromq", 2)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    pair = post(a, 1), post(b, 0)
    assert (a.take(pair[0], HANG_SECONDS), b.take(pair[1], HANG_SECONDS)) == (D, D)
    until(lambda: a.poll() or ends[0]._links[1].was_up)  # else it is not yet seen to go down
    ends[0]._links[1].note(_zeromq_link.DOWN)
    ends[0]._links[1].note(_zeromq_link.UP)
    waits = post(b, 0, round=1)
    assert a.take(post(a, 1, round=1), HANG_SECONDS) in (D, X)
    until(lambda: a.poll() or a.gone == {1: "was lost"})
    if waits.open:
        b.take(waits, 0.0)
    again = post(b, 0, round=2)
    until(lambda: (a.poll(), b.poll()) and b.gone == {0: "was lost"})
    assert not again.open
    for end in (a, b):
        end.enter(1, 3, [0, 1])
    assert a.gone == b.gone == {}
    until(lambda: a.poll() or b.poll() or (a.heard, b.heard) == (3, 3))
    anew = post(a, 1, round=3, value=5), post(b, 0, round=3, value=6)
    assert (a.take(anew[0], HANG_SECONDS), b.take(anew[1], HANG_SECONDS)) == (D, D)
    assert anew[0].received.tolist() == [6.0] * 4
    a.close()
    b.close()


@pytest.mark.parametrize("name", ["in-process", "zeromq"])
def test_close_of_both_ends_waits_for_nobody_and_leaves_no_thread(name):
    before = set(ours())
    ends = make_transports(name, 4)
    channels = [Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends]
    for channel in channels:
        for peer in set(range(4)) - {channel.rank}:
            post(channel, peer, round=channel.rank ^ peer)
    for channel in channels:
        channel.close(NEVER_SECONDS)
    until_none_but(before)
