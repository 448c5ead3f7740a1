"""Links between real processes."""

import os
import select

import pytest
import torch

import gossipgrad as gg
from gossipgrad.comm import Channel, Outcome, Part
from support.links import make_transports
from support.processes import run_processes
from support.waiting import HANG_SECONDS

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


def test_a_forked_child_may_close_the_session_of_its_parent():
    found = run_processes(2, fork_and_close_the_session)
    assert found == [(7, ["still there", "still there"])] * 2


def test_a_forked_child_keeps_no_pipe_open_beside_links():
    assert run_processes(1, fork_beside_links, grouped=False) == [0]


def test_a_forked_child_leaves_the_links_to_its_parent():
    found = run_processes(1, fork_and_close, grouped=False)
    assert found == [(7, [Outcome.DELIVERED] * 4)]
