"""FSDP2 inside a replica, gossip between replicas: against the unsharded run, in processes."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from support.processes import run_processes
from support.replicas import network
from support.sessions import run_sessions

pytestmark = pytest.mark.process
SHARDS = 2
STEPS = 6
SETTINGS = {"payload": "weights+state", "bucket_bytes": 100}


def batch(replica, shard, step):
    generator = torch.Generator().manual_seed(1000 * replica + 10 * shard + step)
    return torch.randn(5, 6, generator=generator)


def probe(model):
    """A pass outside training, which leaves FSDP's root module unsharded."""
    with torch.no_grad():
        return model(torch.ones(1, 6)).flatten().tolist()


def train(model, optimizer, session, inputs):
    """Steps with clipping; in between all that a session offers, and evaluations."""
    seen = []
    for step in range(STEPS):
        model(inputs(step)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        seen.append(norm.item())
        if step == 1:
            session.broadcast_()
        if step == 2:
            with session.consensus():
                seen += probe(model)
            seen += probe(model)
        if step == 4:
            probe(model)
            session.average_()
    squared = session.consensus_distance() ** 2
    with session.consensus():
        seen += probe(model)
    return seen, squared


def held_by(optimizer):
    """Whole parameters and moments, as lists."""
    (group,) = optimizer.param_groups
    moments = [optimizer.state[p][k] for p in group["params"] for k in ("exp_avg", "exp_avg_sq")]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in group["params"] + moments]
    return [t.detach().flatten().tolist() for t in whole]


def refuses_the_other_shard(session, mesh, shard):
    """Both have the number of their replica, and weights that may be of equal shapes."""
    states = [None] * SHARDS
    dist.all_gather_object(states, session.state_dict(), group=mesh["shard"].get_group())
    assert [state["shard"] for state in states] == [{"shard": [n, SHARDS]} for n in range(SHARDS)]
    with pytest.raises(ValueError, match=rf"is of shard {1 - shard} of 2 on axis 'shard', here is"):
        session.load_state_dict(states[1 - shard])
    with pytest.raises(ValueError, match="state 1 is of another shard than state 0"):
        gg.average_states(states)
    session.load_state_dict(states[shard])


def replica_of_shards(rank, store, replicas, whole):
    """What a rank saw, its replica at the end, momentum, and its part of the squared distance."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (replicas, SHARDS), mesh_dim_names=("gossip", "shard"))
    model = network()
    if not whole:
        for layer in (model[0], model[2]):  # 3 outputs over 2 shards: uneven
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    replica, shard = divmod(rank, SHARDS)
    with gg.gossip(model, optimizer, mesh=mesh["gossip"], **SETTINGS) as session:
        assert (session.rank, session.world_size) == (replica, replicas)
        seen, squared = train(model, optimizer, session, lambda step: batch(replica, shard, step))
        held = held_by(optimizer)
        total = torch.tensor(squared)
        dist.all_reduce(total, group=mesh["shard"].get_group())
        outcomes = session.stats().outcomes
        refuses_the_other_shard(session, mesh, shard)
        session.group.barrier()
    return [seen, *held, [math.sqrt(total.item())]], outcomes


def replica_unsharded(replicas):
    def use(me):
        def inputs(step):
            return torch.cat([batch(me.rank, shard, step) for shard in range(SHARDS)])

        seen, squared = train(me.model, me.optimizer, me.session, inputs)
        return [seen, *held_by(me.optimizer), [math.sqrt(squared)]]

    return run_sessions(replicas, use, optimizer=partial(torch.optim.AdamW, lr=0.02), **SETTINGS)


@pytest.mark.parametrize(
    ("replicas", "whole"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_shards_gossip_like_whole_replicas(replicas, whole):
    """Not to the bit: the gradient is a mean over shards of means, summed in another order."""
    found = run_processes(replicas * SHARDS, replica_of_shards, replicas, whole)
    expected = replica_unsharded(replicas)
    for rank, (figures, outcomes) in enumerate(found):
        for ours, theirs in zip(figures, expected[rank // SHARDS], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6)
        assert outcomes["delivered"] > 0
        assert outcomes["late"] == outcomes["dead_peer"] == outcomes["void"] == 0
