"""State that one rank has alone: equal bits, a p-th of the memory, and checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import gossipgrad as gg
from gossipgrad.errors import GossipError
from support.processes import run_processes

KINDS = (gg.SOAP, gg.KLShampoo, gg.Shampoo)


def build(kind, shards, delay):
    torch.manual_seed(0)
    layers = nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)
    model = nn.Sequential(*layers)
    optimizer = kind(model, lr=3e-3, max_dim=10, refresh=gg.Refresh(4, delay))
    if shards:
        gg.share_roots(optimizer, shard=True)
    return model, optimizer


def train(model, optimizer, steps):
    replica = nn.parallel.DistributedDataParallel(model)
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 12, generator=generator)
        optimizer.zero_grad()
        (replica(x) - x[:, :4].square()).square().mean().backward()
        if step == 7:
            model[2].weight.grad[0, 0] = torch.nan  # on all ranks
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


def state_bytes(optimizer):
    return sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if "." in k)


def _rank_main(rank, store, shards, folder):
    found = []
    for kind in KINDS:
        for delay in (0, 2):
            model, optimizer = build(kind, shards, delay)
            weights = train(model, optimizer, range(14))
            state = get_optimizer_state_dict(model, optimizer)
            path = f"{folder}/{kind.__name__}-{delay}-{shards}"
            dcp.save({"optimizer": state}, checkpoint_id=path)
            twin, other = build(kind, shards, delay)
            read = {"optimizer": get_optimizer_state_dict(twin, other)}
            dcp.load(read, checkpoint_id=path)
            set_optimizer_state_dict(twin, other, read["optimizer"])
            twin.load_state_dict(model.state_dict())
            later = train(model, optimizer, range(14, 22))
            assert train(twin, other, range(14, 22)) == later
            found.append((weights, later, state_bytes(optimizer)))
            optimizer.close()
            other.close()
    return found


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_runs_are_those_of_whole_state_bit_for_bit(tmp_path):
    whole, shards = (run_processes(4, _rank_main, each, str(tmp_path)) for each in (False, True))
    for run in range(2 * len(KINDS)):
        for a, b in zip(whole, shards, strict=True):
            assert a[run][:2] == b[run][:2]
        of_ranks = [each[run][2] for each in shards]
        assert sum(of_ranks) == whole[0][run][2]
        assert max(of_ranks) < 0.6 * whole[0][run][2]  # whole units


def _few_main(rank, store):
    """One matrix on several ranks."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = gg.SOAP(model, lr=3e-3)
    sharding = gg.share_roots(optimizer, shard=True)
    for shard in (False, True):
        with pytest.raises(GossipError, match="shared already"):
            gg.share_roots(optimizer, shard=shard)
    replica = nn.parallel.DistributedDataParallel(model)
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        replica(x).square().mean().backward()
        optimizer.step()
    with pytest.raises(GossipError, match="state_dict"):
        copy.deepcopy(optimizer)
    assert sharding.owners == [0]
    assert (state_bytes(optimizer) > 0) == (rank == 0)
    return [p.tolist() for p in model.parameters()]


@pytest.mark.process
def test_ranks_without_a_unit_follow():
    first, *others = run_processes(4, _few_main)
    assert others == [first] * 3


def _fsdp_main(rank, store, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, gg.SOAP(model, lr=0.02, refresh=gg.Refresh(4, 2))

    def steps(model, optimizer, numbers):
        for number in numbers:
            x = torch.randn(9, 8, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.full_tensor().tolist() for p in model.parameters()]

    model, optimizer = build()
    steps(model, optimizer, range(10))
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    twin, other = build()
    read = {"model": twin.state_dict(), "optimizer": get_optimizer_state_dict(twin, other)}
    dcp.load(read, checkpoint_id=folder)
    set_optimizer_state_dict(twin, other, read["optimizer"])
    twin.load_state_dict(read["model"])
    later = steps(model, optimizer, range(10, 18))
    assert steps(twin, other, range(10, 18)) == later
    optimizer.close()
    other.close()
    return later


@pytest.mark.process
def test_shards_of_fsdp_are_saved_and_loaded_each_under_its_own_name(tmp_path):
    first, second = run_processes(2, _fsdp_main, str(tmp_path))
    assert first == second


@pytest.mark.parametrize("call", [gg.gossip, gg.sparsify])
def test_sessions_and_sharded_state_are_not_combined(call):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = nn.Linear(4, 3)
        optimizer = gg.SOAP(model)
        gg.share_roots(optimizer, shard=True)
        with pytest.raises(ValueError, match="shard=True"):
            call(model, optimizer)
        optimizer = gg.SOAP(model)
        with call(model, optimizer), pytest.raises(GossipError, match="shard=True"):
            gg.share_roots(optimizer, shard=True)
        gg.share_roots(optimizer, shard=True)  # the session is closed
    finally:
        dist.destroy_process_group()


def test_a_single_process_and_an_optimizer_with_state_are_refused():
    model = nn.Linear(4, 3)
    optimizer = gg.SOAP(model)
    with pytest.raises(ValueError, match="init_process_group"):
        gg.share_roots(optimizer, shard=True)
