"""FSDP2 and tensor parallelism inside islands: a mesh of three axes against whole replicas."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, TCPTransport
from support.processes import run_processes
from support.sessions import run_sessions

pytestmark = pytest.mark.process
STEPS = 6
SETTINGS = {"payload": "weights+state", "bucket_bytes": 100}


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(replica, shard, step):
    generator = torch.Generator().manual_seed(1000 * replica + 10 * shard + step)
    return torch.randn(5, 6, generator=generator)


def train(model, optimizer, session, inputs):
    for step in range(STEPS):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            session.average_()
    with session.consensus():
        probe = model(torch.ones(1, 6)).flatten().tolist()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [probe, *(p.detach().flatten().tolist() for p in whole)]


def on_a_mesh(rank, store, shards, tensors):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(
        "cpu", (2, shards, tensors), mesh_dim_names=("gossip", "shard", "tensor")
    )
    model = with_norm()
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if shards > 1:
        fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    replica, shard, _ = mesh.get_coordinate()
    island = mesh["shard", "tensor"] if shards > 1 else mesh["tensor"]
    with gg.gossip(model, optimizer, mesh=mesh["gossip"], island=island, **SETTINGS) as session:
        found = train(model, optimizer, session, lambda step: batch(replica, shard, step))
        outcomes = session.stats().outcomes
        dist.barrier()
    assert outcomes["delivered"] > 0
    assert outcomes["void"] == outcomes["late"] == 0
    return found


@pytest.mark.parametrize(("shards", "tensors"), [(2, 2), pytest.param(1, 2, id="tensors alone")])
def test_a_mesh_of_three_axes_trains_like_whole_replicas(shards, tensors):
    def use(me):
        def inputs(step):
            return torch.cat([batch(me.rank, shard, step) for shard in range(shards)])

        return train(me.model, me.optimizer, me.session, inputs)

    found = run_processes(2 * shards * tensors, on_a_mesh, shards, tensors)
    start = with_norm()  # here: ranks are threads, which share one generator
    expected = run_sessions(
        2,
        use,
        make=lambda rank: copy.deepcopy(start),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        **SETTINGS,
    )
    for rank, ours in enumerate(found):
        for mine, other in zip(ours, expected[rank // (shards * tensors)], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=2e-6)


def check_equal(shard, mesh):
    """Ranks that repeat a shard have equal ones."""
    both = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(both, shard.detach(), group=mesh["tensor"].get_group())
    assert torch.equal(*both)


def with_late_parts(rank, store):
    """The rank that repeats a shard gets its parts late, or not at all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("gossip", "shard", "tensor"))
    replica, _, index = mesh.get_coordinate()
    delay = "delay rank=0 rounds=1-3 seconds=0.3"
    drop = f"{delay}; drop rank=1 round=5"  # one end counts it, so the mean may move
    for mode, script in ((gg.Stale(), delay), (gg.Overlap(patience_seconds=0.01), drop)):
        faults = Faults.parse(script if index else "")
        model = with_norm()
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model,
            optimizer,
            mode=mode,
            mesh=mesh["gossip"],
            island=mesh["shard", "tensor"],
            bucket_bytes=100,
            transport=lambda group, faults=faults: FaultyTransport(TCPTransport(group), faults),
        ) as session:
            norm = model[0].weight.to_local()
            with torch.no_grad():
                norm.add_(replica)
            for step in range(8):
                model(batch(replica, 0, step)).square().mean().backward()
                optimizer.step()
                check_equal(norm, mesh)
            outcomes = session.stats().outcomes
            with session.consensus():
                check_equal(norm, mesh)
            session.average_()
            check_equal(norm, mesh)
            if isinstance(mode, gg.Stale):  # another mode may give up what is too late
                assert torch.allclose(norm, torch.full_like(norm, 1.5))
            dist.barrier()
        if index and script == drop:
            assert outcomes["late"] + outcomes["void"] > 0


def test_ranks_that_repeat_a_shard_keep_it_equal_though_parts_are_late():
    run_processes(4, with_late_parts)
