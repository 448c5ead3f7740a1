"""Links between real processes."""

import json
import os
import select
import signal

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Channel, Lost, Outcome, Part, TCPTransport, Ticket
from support.links import make_transports
from support.processes import run_processes
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process


def fork_and_close(rank, store):
    """As a data loader does, whose workers are copies of the process, with its sockets."""
    a, b = (
        Channel(transport, run=bytes(16), plan=[Part(torch.float32, 4)])
        for transport in make_transports("tcp", 2)
    )

    def pair(round):
        x = a.post(round, 0, torch.zeros(4), send_to=1, recv_from=1)
        y = b.post(round, 0, torch.zeros(4), send_to=0, recv_from=0)
        return [a.take(x, HANG_SECONDS), b.take(y, HANG_SECONDS)]

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


def fork_beside_links(rank, store):
    """Fork with a pipe whose other end the child closes, and then this process."""
    transports = make_transports("tcp", 2)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        ended, *_ = select.select([reader], [], [], HANG_SECONDS)
        os._exit(0 if ended else 1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    for transport in transports:
        transport.close(0)
    return os.waitstatus_to_exitcode(status)


def fork_and_close_the_session(rank, store):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.gossip(model, optimizer) as session:
        if (child := os.fork()) == 0:
            try:
                session.close()
                os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), session.agree("still there")


def leave_while_the_other_stands(rank, store):
    """Rank 1 sends and ends while rank 0 stands still, which then sends before it reads."""
    if rank == 0:
        transport = TCPTransport.joining(0, 2, introductions={}, secret="00")
        store.set("to", json.dumps(transport.introduction))
        until(lambda: transport.receive(0.1))
        store.set("pid", str(os.getpid()))
        events, payload = [], torch.zeros(1 << 22)
        while not any(isinstance(event, Lost) for event in events):
            ticket = Ticket()
            transport.send(1, b"more", payload)
            transport.send(1, b"more", payload, ticket)
            until(lambda ticket=ticket: ticket.done)
            events += transport.receive(0.0)
        transport.close()
        return [event.header for event in events if not isinstance(event, Lost)]
    to = json.loads(store.get("to"))
    transport = TCPTransport.joining(1, 2, introductions={0: to}, secret="00")
    transport.send(0, b"here")
    pid = int(store.get("pid"))
    until(lambda: transport.receive(0.1))
    os.kill(pid, signal.SIGSTOP)
    for number in range(100):
        transport.send(0, b"%d" % number)
    transport.close(0.5)
    os.kill(pid, signal.SIGCONT)
    return [b"%d" % number for number in range(100)]


def test_what_a_rank_sent_before_its_end_arrives_though_the_other_still_sends():
    found, sent = run_processes(2, leave_while_the_other_stands, grouped=False)
    assert found == sent


def test_a_forked_child_may_close_the_session_of_its_parent():
    found = run_processes(2, fork_and_close_the_session)
    assert found == [(7, ["still there", "still there"])] * 2


def test_a_forked_child_keeps_no_pipe_open_beside_links():
    assert run_processes(1, fork_beside_links, grouped=False) == [0]


def test_a_forked_child_leaves_the_links_to_its_parent():
    found = run_processes(1, fork_and_close, grouped=False)
    assert found == [(7, [Outcome.DELIVERED] * 4)]
