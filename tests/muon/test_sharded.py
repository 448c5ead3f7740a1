"""FSDP2 under gg.Muon: a matrix is gathered, polarised whole, and each rank keeps its shard."""

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.processes import run_processes

pytestmark = pytest.mark.process
STEPS = 3


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, optimizer):
    for step in range(STEPS):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(rank, store, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(model_of(), mesh=mesh)
    optimizer = gg.Muon(model, weight_decay=0.1)
    train(model, optimizer)
    return [p.full_tensor().detach().tolist() for p in model.parameters()]


def test_shards_train_as_the_whole():
    model = model_of()
    train(model, gg.Muon(model, weight_decay=0.1))
    for found in run_processes(3, sharded, 3):
        for a, b in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(a.detach(), torch.tensor(b))
