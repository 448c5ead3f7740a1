"""Scripts that just return, and close nothing: they end soon, and say nothing."""

import os
import subprocess
import sys

import pytest

from support.processes import free_port
from support.waiting import HANG_SECONDS

pytestmark = pytest.mark.process

SESSION = """
import torch, torch.distributed as dist, gossipgrad as gg

def main():
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gg.gossip(model, optimizer, bucket_bytes=1 << 17)
    for step in range(4 + 4 * dist.get_rank()):
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()

main()
"""

TRANSPORT = """
import weakref, torch
from gossipgrad.comm import TCPTransport

def farewell():  # as a session's, which is run at exit
    a.send(1, b"last", torch.zeros(1 << 18, dtype=torch.uint8))
    while not (events := b.receive(0.1)):
        pass
    print("came", events[0].header)

b = TCPTransport.joining(1, 2, introductions={}, secret="00")
a = TCPTransport.joining(0, 2, introductions={1: b.introduction}, secret="00")
weakref.finalize(b, farewell)
a.send(1, b"first", torch.zeros(1 << 18, dtype=torch.uint8))
while not b.receive(0.1):
    pass
"""


def ended(script, world_size=1, **more):
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more
    shared |= {"WORLD_SIZE": str(world_size)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    told = [process.communicate(timeout=HANG_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, told
    return told


def test_a_session_that_nobody_closed_leaves_without_a_word():
    """Nor does the rank that goes on: it was told that the other left, and was not lost."""
    assert ended(SESSION, 2) == [("", "")] * 2


@pytest.mark.slow
def test_a_last_message_that_is_not_copied_still_goes_out_at_exit():
    assert ended(TRANSPORT) == [("came b'last'\n", "")]
