"""What each transport must stand by itself: strangers, broken links, queues that are full."""

import contextlib
import os
import resource
import socket
import threading
import time
from itertools import count

import pytest
import torch

from gossipgrad.comm import (
    BucketPlan,
    Channel,
    Header,
    Kind,
    Outcome,
    Part,
    SnapshotPool,
    TCPTransport,
    TensorSpec,
    Ticket,
)
from gossipgrad.errors import GossipError
from support.links import RUN, both, cut, make_transports, ours, post, until_none_but
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS, NEVER_SECONDS, until

D, X = Outcome.DELIVERED, Outcome.DEAD_PEER
GOOD = {"kind": Kind.DATA, "run": RUN, "sender": 1, "round": 0, "dtype": torch.float32}


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


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(1 << 10), bytes(1 << 20)])
def test_a_stranger_on_the_port_disturbs_nobody(said):
    ends = make_transports("tcp", 2)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    host, port = ends[0].introduction[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
        both(a, b)
        if said:
            stranger.settimeout(HANG_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1 << 10) == b""
    assert a.refused == 0, "it never reached the channel"
    assert a.gone == b.gone == {}
    for end in ends:
        end.close()


def test_garbage_of_a_rank_is_dropped_and_counted():
    ends = make_transports("tcp", 2)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    good = Header(**GOOD, size_bytes=16).pack()
    for number, header in enumerate([b"", b"hello", bytes(1 << 14), good[:-1]]):
        ends[1].send(0, header, torch.zeros(16, dtype=torch.uint8))
        until(lambda number=number: a.poll() or a.refused == number + 1)
    both(a, b)
    for end in ends:
        end.close()


def test_a_payload_of_the_limit_arrives_and_none_above_it():
    size, events = (1 << 16) + 16, []
    ends = run_ranks(2, lambda rank, group: TCPTransport(group, max_payload_bytes=size))
    ends[0].send(1, bytes(1 << 14), torch.ones(size, dtype=torch.uint8))
    until(lambda: events.extend(ends[1].receive(0.01)) or events)
    assert events[0].header == bytes(1 << 14)
    assert events[0].payload.eq(1).all()
    assert events[0].payload.numel() == size
    with pytest.raises(ValueError, match=f"is above max_payload_bytes={size}: use smal"):
        ends[0].send(1, b"header", torch.zeros(size + 1, dtype=torch.uint8))
    for end in ends:
        end.close()


def test_messages_of_all_sizes_arrive_whole_and_in_order_both_ways():
    """Also those that are sent while both ends connect."""
    ends, sizes = make_transports("tcp", 2), [0, 1, 1 << 12, 3 << 20, 1 << 14, 5, 7 << 20, 0]

    def talk(end):
        peer, found, tickets = 1 - end.rank, [], []
        for number, size in enumerate(sizes):
            payload = torch.full((size,), number, dtype=torch.uint8) if size else None
            tickets.append(Ticket())
            end.send(peer, b"%d" % number, payload, tickets[-1])
        until(lambda: found.extend(end.receive(0.1)) or len(found) == len(sizes))
        until(lambda: all(ticket.done for ticket in tickets))
        return found

    threads = [threading.Thread(target=talk, args=(ends[1],))]
    threads[0].start()
    found = talk(ends[0])
    threads[0].join()
    assert [event.header for event in found] == [b"%d" % n for n in range(len(sizes))]
    for number, (event, size) in enumerate(zip(found, sizes, strict=True)):
        assert (0 if event.payload is None else event.payload.numel()) == size
        assert event.payload is None or event.payload.eq(number).all()
    for end in ends:
        end.close()


def test_a_failed_start_leaves_no_thread():
    before = set(ours())
    with pytest.raises(ValueError, match=r"cannot listen on bind='192\.0\.2\.1'.*of this host"):
        run_ranks(2, lambda rank, group: TCPTransport(group, bind="192.0.2.1"))
    with pytest.raises(ValueError, match=r"bind='0\.0\.0\.0' is every interface.*10\.0\.0\.7"):
        run_ranks(2, lambda rank, group: TCPTransport(group, bind="0.0.0.0"))

    def one_dies(rank, group):
        if rank == 1:
            group.close()
            return None
        with pytest.raises(GossipError):
            return TCPTransport(group)

    run_ranks(2, one_dies)
    until_none_but(before)


def test_a_world_for_which_the_system_has_too_few_open_files_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 1000))
    with pytest.raises(ValueError, match=r"5000 ranks need about .* allows 1000"):
        TCPTransport.joining(0, 5000, introductions={}, secret="00")


def test_a_link_that_broke_is_seen_by_both_and_made_again_in_the_next_generation():
    """Until then both ends see the other as gone, and neither hangs."""
    ends = make_transports("tcp", 2)
    a, b = (Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in ends)
    both(a, b)
    waits = post(b, 0, round=1)
    cut(ends[0], 1)
    until(lambda: (a.poll(), b.poll()) and a.gone == {1: "was lost"} and b.gone == {0: "was lost"})
    assert not waits.open
    assert (post(a, 1, round=2).outcome, post(b, 0, round=2).outcome) == (X, X)
    for end in (a, b):
        end.enter(1, 3, [0, 1])
    assert a.gone == b.gone == {}
    until(lambda: a.poll() or b.poll() or (a.heard, b.heard) == (3, 3))
    assert both(a, b, round=3, value=6) == [6.0] * 4
    a.close()
    b.close()


def test_a_rank_that_closes_has_left_also_where_it_never_exchanged():
    a, b = (
        Channel(end, run=RUN, plan=[Part(torch.float32, 4)]) for end in make_transports("tcp", 2)
    )
    a.close()
    until(lambda: b.poll() or b.gone)
    assert b.gone == {0: "left"}
    b.close()


@pytest.mark.parametrize("name", ["in-process", "tcp"])
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


def snapshot_of(value, size):
    """A part of one number in memory that other processes of this host can read."""
    spec = TensorSpec("w", (size,), torch.float32)
    pool = SnapshotPool(BucketPlan.make([spec]), torch.device("cpu"), limit=2)
    snapshot = pool.acquire(lambda: None, 0.0)
    return pool, snapshot.take(0, [torch.full((size,), float(value))])[0]


def exchanged(channels, size, round):
    """Rank 1 reads the part of rank 0: whether that was in its memory, and still its sender's."""
    pool, part = snapshot_of(round, size)
    ticket, seen = Ticket(), []

    def read(exchange):
        seen.append((exchange.release is not None, ticket.done))
        assert exchange.received.eq(round).all()
        exchange.release_part()

    a, b = channels
    mine = a.post(round, 0, part, send_to=1, recv_from=1, ticket=ticket)
    theirs = b.post(round, 0, torch.ones(size), send_to=0, recv_from=0, on_arrival=read)
    assert (a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)) == (D, D)
    assert mine.received.eq(1).all()
    until(lambda: ticket.done and seen)
    assert pool.size_bytes == part.nbytes
    return seen[0]


def ends_of(size):
    plan = [Part(torch.float32, size)]
    return [Channel(end, run=RUN, plan=plan, window=2) for end in make_transports("tcp", 2)]


def test_a_part_in_shared_memory_is_its_senders_until_it_is_read():
    channels, size = ends_of(1 << 20), 1 << 20
    rounds = count()
    # At first the ends do not know yet that they can read each other's memory.
    until(lambda: exchanged(channels, size, next(rounds)) == (True, False))
    for channel in channels:
        channel.close()


def test_parts_pass_the_socket_where_python_has_no_files_in_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    channels, size = ends_of(1 << 20), 1 << 20
    assert [exchanged(channels, size, round)[0] for round in range(20)] == [False] * 20
    for channel in channels:
        channel.close()


def test_links_that_have_ended_keep_no_processor_busy():
    """A channel whose links ended under it, as those of a rank that a test kills, waits."""
    channels, size = ends_of(4), 4
    for channel, peer in zip(channels, (1, 0), strict=True):
        post(channel, peer, size=size)
    channels[0].transport.close()
    calls, receive = [], channels[0].transport.receive
    channels[0].transport.receive = lambda seconds: calls.append(seconds) or receive(seconds)
    until(lambda: len(calls) >= 2)
    start, before = time.monotonic(), len(calls)
    until(lambda: len(calls) >= before + 3)
    assert time.monotonic() - start >= sum(calls[before + 1 : before + 3]) / 2
    for channel in channels:
        channel.close(0.0)
