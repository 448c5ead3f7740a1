"""A world of 64 processes on one machine: it starts, makes its first steps, and ends."""

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from support.processes import run_processes
from support.replicas import network, sgd

RANKS, STEPS = 64, 20


def train(rank, store):
    torch.set_num_threads(1)
    model = network()
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer, start_timeout_seconds=600.0) as session:
        for step in range(STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank + step))
            optimizer.step()
        distance = session.consensus_distance()
        outcomes, lost = session.stats().outcomes, session.membership.lost
        dist.barrier()
    return outcomes, lost, distance


@pytest.mark.slow
@pytest.mark.process
def test_sixty_four_processes_start_and_make_their_first_steps():
    for outcomes, lost, distance in run_processes(RANKS, train, timeout_seconds=900.0):
        assert outcomes["delivered"] + outcomes["late"] >= STEPS
        assert (outcomes["dead_peer"], lost) == (0, {})
        assert 0 < distance < float("inf")
