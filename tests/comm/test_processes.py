"""Links between real processes."""

import os

import pytest
import torch

from gossipgrad.comm import Channel, Outcome, Part
from support.links import make_transports
from support.processes import run_processes
from support.waiting import HANG_SECONDS

pytestmark = pytest.mark.process


def fork_and_close(rank, store):
    """As a data loader does, whose workers are copies of the process, with its sockets."""
    a, b = (
        Channel(transport, run=bytes(16), plan=[Part(torch.float32, 4)])
        for transport in make_transports("zeromq", 2)
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


def test_a_forked_child_leaves_the_links_to_its_parent():
    found = run_processes(1, fork_and_close, grouped=False)
    assert found == [(7, [Outcome.DELIVERED] * 4)]
