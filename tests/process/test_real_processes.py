"""Sessions between true processes: groups, meshes, and a SIGKILL."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.topology import matching
from support.processes import run_processes
from support.replicas import backward, network, sgd

pytestmark = pytest.mark.process


def _train(steps, rank, model, optimizer):
    for step in range(steps):
        backward(model, rank, step)
        optimizer.step()


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def _default_group(rank, store):
    model = network(seed=rank)
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer) as session:
        _train(10, rank, model, optimizer)
        with session.consensus():
            mean = _flat(model)
        stats = session.stats()
    # The user's own group is untouched: collectives on it still match up.
    total = torch.ones(1)
    dist.all_reduce(total)
    return mean, stats.outcomes, total.item()


def test_default_group():
    answers = run_processes(4, _default_group)
    for mean, outcomes, total in answers:
        assert mean == answers[0][0]
        assert outcomes == {"delivered": 10, "late": 0, "dead_peer": 0, "void": 0}
        assert total == 4


def _groups_and_meshes(rank, store):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = network(seed=rank)
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(model, optimizer, process_group=pairs[rank // 2]) as session:
        assert (session.rank, session.world_size) == (rank % 2, 2)
        _train(4, rank, model, optimizer)
        with session.consensus():
            in_pair = _flat(model)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("gossip", "shard"))
    with pytest.raises(ValueError, match=r"mesh has 2 axes .* mesh=mesh\['gossip'\]"):
        gg.gossip(model, optimizer, mesh=mesh)
    with pytest.raises(ValueError, match="name the same thing"):
        gg.gossip(model, optimizer, mesh=mesh["gossip"], process_group=pairs[rank // 2])
    other = network(seed=10 + rank)
    second = sgd(list(other.parameters()))
    with gg.gossip(other, second, mesh=mesh["gossip"]) as session:
        assert (session.rank, session.world_size) == (rank // 2, 2)
        _train(4, rank, other, second)
        with session.consensus():
            in_axis = _flat(other)
    # One after another on one group: sessions do not get into each other's way.
    for _ in range(2):
        with gg.gossip(model, optimizer) as session:
            _train(2, rank, model, optimizer)
            session.average_()
    return in_pair, in_axis, _flat(model)


def test_groups_and_meshes():
    answers = run_processes(4, _groups_and_meshes)
    pairs, axes, last = zip(*answers, strict=True)
    assert last[0] == last[1] == last[2] == last[3]
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3]
    assert axes[0] == axes[2] != axes[1] == axes[3]


def _compiled(rank, store):
    model = network(seed=rank)
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(list(model.parameters()))
    with gg.gossip(compiled, optimizer) as session:
        for step in range(6):
            backward(compiled, rank, step)
            optimizer.step()
        with session.consensus():
            return _flat(compiled), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_model():
    answers = run_processes(2, _compiled)
    assert answers[0] == answers[1]
    assert answers[0][1] == 1  # mixing makes nothing compile anew


def _killed(rank, store):
    model = network()
    optimizer = sgd(list(model.parameters()))
    # It breaks its links, so nobody waits for its heartbeats.
    patient = gg.Heartbeats(interval_seconds=0.2, silent_seconds=60.0)
    with gg.gossip(model, optimizer, topology=matching(4), heartbeats=patient) as session:
        for step in range(60):
            if rank == 0 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, rank, step)
            optimizer.step()
        outcomes = session.stats().outcomes
        with session.consensus():  # of the living: those who are left meet again without rank 0
            mean = _flat(model)
        delivered = session.stats().outcomes["delivered"]
        _train(10, rank, model, optimizer)
        after = session.stats().outcomes["delivered"] - delivered
        lost = session.membership.lost
    return outcomes, after, mean, lost


def test_rank_0_is_killed_and_the_others_train_on():
    answers = run_processes(4, _killed, may_die=(0,))
    assert answers[0] is None
    for outcomes, after, mean, lost in answers[1:]:
        assert set(lost) == {0}
        assert mean == answers[1][2]
        assert outcomes["dead_peer"] > 0
        assert outcomes["delivered"] > 20
        assert after > 0
