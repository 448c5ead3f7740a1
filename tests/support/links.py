"""Transports of all kinds between ranks of one process."""

import socket
import threading
from collections.abc import Set

import pytest
import torch

from gossipgrad.comm import Channel, Exchange, Hub, Outcome, TCPTransport, Transport
from support.ranks import run_ranks, where
from support.waiting import HANG_SECONDS, until

__all__ = [
    "RUN",
    "both",
    "cut",
    "make_transports",
    "ours",
    "post",
    "until_none_but",
]

RUN = bytes(range(16))


def make_transports(kind: str, world_size: int) -> list[Transport]:
    """One transport a rank; `kind` is "in-process" or "tcp"."""
    if kind == "in-process":
        hub = Hub(world_size)
        return [hub.transport(rank) for rank in range(world_size)]
    return run_ranks(world_size, lambda rank, group: TCPTransport(group))


def post(channel: Channel, peer: int, round=0, value=0.0, bucket=0, size=4, **options) -> Exchange:
    """Begins an exchange of equal numbers with a peer."""
    values = torch.full((size,), float(value))
    return channel.post(round, bucket, values, send_to=peer, recv_from=peer, **options)


def both(a: Channel, b: Channel, round: int = 0, value: float = 0.0) -> list[float]:
    """An exchange that counts; what the first one gets."""
    mine, theirs = post(a, b.rank, round), post(b, a.rank, round, value)
    ends = a.take(mine, HANG_SECONDS), b.take(theirs, HANG_SECONDS)
    assert ends == (Outcome.DELIVERED,) * 2
    return mine.received.tolist()


def cut(transport: TCPTransport, peer: int) -> None:
    """Ends the connection to a rank, as a network does; both ends see it."""
    until(lambda: peer in transport._links and transport._links[peer].is_up)
    transport._links[peer].connection.sock.shutdown(socket.SHUT_RDWR)


def ours() -> list[threading.Thread]:
    """Threads of gossipgrad."""
    return [t for t in threading.enumerate() if t.name.startswith("gossipgrad")]


def until_none_but(before: Set[threading.Thread], timeout_seconds: float = HANG_SECONDS) -> None:
    """Returns when no thread of gossipgrad runs but these; says where others stand if some do."""
    try:
        until(lambda: {*ours()} <= before, timeout_seconds)
    except AssertionError:
        pytest.fail("left behind: " + "".join(map(where, {*ours()} - before)))
