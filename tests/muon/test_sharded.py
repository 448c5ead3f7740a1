"""gg.Muon under FSDP2 and DDP: one rank polarises a matrix, and all get their part of it."""

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


def shapes_model():
    """Uneven rows, a stack of experts, a convolution, a large matrix, and more ranks than rows."""
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(5, 6, 4))
    model.conv = nn.Conv2d(3, 7, 3, bias=False)
    model.layers = nn.ModuleList(
        nn.Linear(inputs, outputs) for inputs, outputs in ((9, 9), (160, 150), (9, 2), (9, 9))
    )
    return model


def step_by(optimizer, parameters, whole_of):
    """Three steps with the same gradients on all ranks."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = whole_of(p, torch.randn(p.shape, generator=generator))
        optimizer.step()


OPTIONS = {"weight_decay": 0.1, "split": {"layers.1": (100, 50)}, "muon": ["layers.*.weight"]}


def shared_by_rows(rank, store, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = fully_shard(shapes_model(), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = gg.Muon(model, **OPTIONS)
    step_by(
        optimizer,
        list(model.parameters()),
        lambda p, grad: distribute_tensor(grad, p.device_mesh, p.placements),
    )
    return [p.full_tensor().detach().tolist() for p in model.parameters()]


def shared_by_copies(rank, store, world_size):
    model = nn.parallel.DistributedDataParallel(shapes_model())
    step_by(gg.Muon(model, **OPTIONS), list(model.parameters()), lambda p, grad: grad)
    return [p.detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize("shared", [shared_by_rows, shared_by_copies])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_work_gives_the_bits_of_one_rank(shared, world_size):
    model = shapes_model()
    step_by(gg.Muon(model, **OPTIONS), list(model.parameters()), lambda p, grad: grad)
    for found in run_processes(world_size, shared, world_size):
        for p, values in zip(model.parameters(), found, strict=True):
            assert torch.equal(p.detach(), torch.tensor(values))


def with_some_gradients(rank, store, world_size):
    """Layer 1 has no gradient on rank 1; then none anywhere; then again on all ranks."""
    model = nn.parallel.DistributedDataParallel(shapes_model())
    optimizer, parameters = gg.Muon(model, **OPTIONS), list(model.parameters())
    weight = model.module.layers[1].weight
    step_by(optimizer, parameters, lambda p, grad: grad)
    before = [p.detach().clone() for p in parameters]
    weight.grad = torch.ones_like(weight) if rank == 0 else None
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
        optimizer.step()
    assert all(map(torch.equal, before, parameters))
    step_by(optimizer, parameters, lambda p, grad: None if p is weight else grad)
    step_by(optimizer, parameters, lambda p, grad: grad)
    return [p.detach().tolist() for p in parameters]


def test_a_gradient_on_some_ranks_only_is_an_error_on_all_and_one_on_none_leaves_the_weight():
    model = shapes_model()
    optimizer, parameters = gg.Muon(model, **OPTIONS), list(model.parameters())
    weight = model.layers[1].weight
    step_by(optimizer, parameters, lambda p, grad: grad)
    step_by(optimizer, parameters, lambda p, grad: None if p is weight else grad)
    step_by(optimizer, parameters, lambda p, grad: grad)
    for found in run_processes(2, with_some_gradients, 2):
        for p, values in zip(parameters, found, strict=True):
            assert torch.equal(p.detach(), torch.tensor(values))
