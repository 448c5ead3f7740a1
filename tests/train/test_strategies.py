"""Strategies in real processes, step by step, against replicas trained side by side in this one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossipgrad.train import SparseConfig
from gossipgrad.train._result import PeerLostError
from gossipgrad.train.strategies import ring_bytes
from support.processes import run_processes
from support.replicas import flat, network
from support.strategies import STEPS, loss_of, sgd, start, take_step

pytestmark = pytest.mark.process
WORLD_SIZE = 3


def plan(name):
    """All coordinates are sent, so that sparse messages lose nothing."""
    return {"options": {"sparse": SparseConfig(plan=name, density=1.0)}}


STRATEGIES = {
    "allreduce": ("allreduce", {}),
    "dense, each tensor": ("sparse", plan("wfbp")),
    "sparse, one message": ("sparse", plan("single")),
    "optimal": ("sparse", plan("optimal")),  # the plan is changed in the seventh step
}
PARAMETERS = sum(p.numel() for p in network().parameters())


def train_all(rank, store):
    """The weights after every step, and what was sent, by strategy."""
    found = {}
    for case, (name, options) in STRATEGIES.items():
        model = network()
        optimizer = sgd(model)
        strategy = start(rank, name, model, optimizer, **options)
        held = []
        for step in range(STEPS):
            take_step(strategy, optimizer, rank, step)
            held.append(flat(model).tolist())
        traffic = strategy.traffic()
        dist.barrier()
        strategy.close()
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        found[case] = held, traffic, sum(hooks)
    return found


@pytest.fixture(scope="module")
def runs():
    return run_processes(WORLD_SIZE, train_all)


def side_by_side():
    """Weights of all ranks after every step, with all replicas in this process."""
    models = [network() for _ in range(WORLD_SIZE)]
    optimizers = [sgd(model) for model in models]
    held = []
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss_of(model, rank, step).backward()
        average([[p.grad for p in model.parameters()] for model in models])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        held.append([flat(model) for model in models])
    return held


def average(tensors: list[list[torch.Tensor]]) -> None:
    for of_ranks in zip(*tensors, strict=True):
        mean = torch.stack(of_ranks).mean(0)
        for tensor in of_ranks:
            tensor.copy_(mean)


@pytest.mark.parametrize("case", STRATEGIES)
def test_every_step_is_that_of_replicas_side_by_side(runs, case):
    expected = side_by_side()
    for rank in range(WORLD_SIZE):
        for step, held in enumerate(runs[rank][case][0]):
            mine = torch.tensor(held)
            torch.testing.assert_close(mine, expected[step][rank], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", STRATEGIES)
def test_replicas_are_equal_to_the_bit(runs, case):
    assert all(run[case][0] == runs[0][case][0] for run in runs)


def test_bytes_are_those_of_ring_all_reduces(runs):
    a_step = ring_bytes(4 * PARAMETERS, WORLD_SIZE)
    for case, roundings in (("allreduce", 8), ("dense, each tensor", 8 * 4)):
        traffic = runs[0][case][1]
        assert traffic.bytes_sent == pytest.approx(8 * a_step, abs=roundings), case
        assert traffic.exposed_seconds > 0


def test_hooks_are_gone_after_close(runs):
    assert runs[0]["optimal"][2] == 0


def lose(rank, store, lost, after_steps, name):
    """Rank `lost` leaves after some steps; what the other takes that for."""
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    optimizer = sgd(model)
    strategy = start(rank, name, model, optimizer)
    for _ in range(after_steps):
        take_step_on_labels(strategy, optimizer)
    dist.barrier()
    if rank == lost:
        return None
    try:
        for _ in range(4):
            take_step_on_labels(strategy, optimizer)
    except PeerLostError as error:
        return str(error)
    return "nothing was noticed"


def take_step_on_labels(strategy, optimizer):
    outputs = strategy.forward(torch.ones(5, 6))
    strategy.backward(cross_entropy(outputs, torch.zeros(5, dtype=torch.long)))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "lost", "after_steps"),
    [
        ("allreduce", 1, 2),
        ("allreduce", 0, 1),  # in the second forward pass, where buckets are agreed on
        ("sparse", 1, 2),
    ],
)
def test_a_peer_that_is_gone_ends_the_run(name, lost, after_steps):
    found = run_processes(2, lose, lost, after_steps, name)[1 - lost]
    assert "failed because a rank is gone" in found
