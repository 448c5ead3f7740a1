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


def trained_shards(world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(model_of(), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = gg.Muon(model, weight_decay=0.1)
    train(model, optimizer)
    return model, optimizer


def sharded(rank, store, world_size):
    model, _ = trained_shards(world_size)
    return [p.full_tensor().detach().tolist() for p in model.parameters()]


def test_shards_train_as_the_whole():
    model = model_of()
    train(model, gg.Muon(model, weight_decay=0.1))
    for found in run_processes(3, sharded, 3):
        for a, b in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(a.detach(), torch.tensor(b))


def with_a_bad_shard(rank, store, world_size):
    model, optimizer = trained_shards(world_size)
    model(torch.ones(5, 6)).square().mean().backward()
    if rank == 1:
        model[0].weight.grad.to_local()[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="finite"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    finite = [bool(p.full_tensor().isfinite().all()) for p in model.parameters()]
    return optimizer.nonfinite_steps, finite


def test_a_gradient_that_is_not_finite_in_one_shard_is_left_out_by_all():
    for steps, finite in run_processes(2, with_a_bad_shard, 2):
        assert steps == 1
        assert all(finite)
