"""Links between real processes."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from gossipgrad.comm import Channel, Group, Outcome, Part, ZeroMQTransport
from support.links import make_transports
from support.processes import run_processes

pytestmark = pytest.mark.process

SIZE = 1 << 18


def open_channel(rank, port):
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    transport = ZeroMQTransport(Group(store, rank, 2))
    return Channel(transport, run=bytes(16), plan=[Part(torch.float32, SIZE)])


def meet(channel, round):
    payload = torch.full((SIZE,), float(channel.rank))
    peer = 1 - channel.rank
    exchange = channel.post(round, 0, payload, send_to=peer, recv_from=peer)
    return channel.take(exchange, 60.0), exchange


def partner(port):
    channel = open_channel(1, port)
    for round in range(3):
        assert meet(channel, round)[0] is Outcome.DELIVERED
    time.sleep(600)


def free_port():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    return store.port


def test_a_partner_that_is_killed_is_dead_within_seconds():
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    process = context.Process(target=partner, args=(port,), daemon=True)
    process.start()
    try:
        channel = open_channel(0, port)
        for round in range(3):
            outcome, exchange = meet(channel, round)
            assert outcome is Outcome.DELIVERED
            assert exchange.received.eq(1).all()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        start = time.perf_counter()
        assert meet(channel, 3)[0] is Outcome.DEAD_PEER
        assert time.perf_counter() - start < 30.0
        assert channel.gone == {1: "was lost"}
        start = time.perf_counter()
        channel.close(linger_seconds=60.0)
        assert time.perf_counter() - start < 30.0
    finally:
        process.kill()
        process.join(10)


def fork_and_close(rank, store):
    """As a data loader does, whose workers are copies of the process, with its sockets."""
    a, b = (
        Channel(transport, run=bytes(16), plan=[Part(torch.float32, 4)])
        for transport in make_transports("zeromq", 2)
    )

    def pair(round):
        x = a.post(round, 0, torch.zeros(4), send_to=1, recv_from=1)
        y = b.post(round, 0, torch.zeros(4), send_to=0, recv_from=0)
        return [a.take(x, 30.0), b.take(y, 30.0)]

    outcomes = pair(0)
    if (child := os.fork()) == 0:
        try:
            a.close()
            b.close()
            os._exit(7)
        finally:
            os._exit(1)
    _, ended = os.waitpid(child, 0)
    outcomes += pair(1)
    a.close()
    b.close()
    return os.waitstatus_to_exitcode(ended), outcomes


def test_a_forked_child_leaves_the_links_to_its_parent():
    found = run_processes(1, fork_and_close, grouped=False)
    assert found == [(7, [Outcome.DELIVERED] * 4)]
