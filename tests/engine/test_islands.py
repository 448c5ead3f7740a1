"""An island ends with one of its ranks, the others train on, and another island joins."""

import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Heartbeats
from support.processes import run_processes
from support.replicas import flat, network

pytestmark = pytest.mark.process
ISLANDS, SIZE = 3, 2
DIES = 3  # rank 1 of island 1


def any_in(island, value):
    found = torch.tensor(int(value))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=island)
    return bool(found)


def step(model, optimizer, rank):
    model(torch.full((1, 6), float(rank))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_until_it_dies(model, optimizer, rank):
    for number in itertools.count():
        if rank == DIES and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, rank)


def member_or_joiner(rank, store, settings):
    from torch.distributed.device_mesh import init_device_mesh

    settings = {"bucket_bytes": 100, "heartbeats": Heartbeats(interval_seconds=0.05), **settings}
    joins = rank >= ISLANDS * SIZE
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if joins:
        own = dist.PrefixStore("joiners", store)
        dist.init_process_group("gloo", store=own, rank=rank - ISLANDS * SIZE, world_size=SIZE)
        island = dist.group.WORLD
        address = store.get("address").decode()
        session = gg.join(model, optimizer, address, island=island, **settings)
    else:
        own = dist.PrefixStore("members", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ISLANDS * SIZE)
        mesh = init_device_mesh("cpu", (ISLANDS, SIZE), mesh_dim_names=("gossip", "node"))
        island = mesh["node"].get_group()
        session = gg.gossip(model, optimizer, mesh=mesh["gossip"], island=mesh["node"], **settings)
        if rank == 0:
            store.set("address", session.join_address())
    with session:
        if rank in (DIES, DIES - 1):
            with pytest.raises(RuntimeError):
                train_until_it_dies(model, optimizer, rank)
            return None

        def is_over():
            if joins and session.stats().outcomes["delivered"] > 3:
                store.set(f"mixed/{rank}", "")
            return store.check([f"mixed/{ISLANDS * SIZE + index}" for index in range(SIZE)])

        while not any_in(island, is_over()):
            step(model, optimizer, rank)
        with session.consensus():
            consensus = flat(model).tolist()
        after = flat(model).tolist()
        session.group.barrier()
        return consensus, after, session.rank


@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "stale"}, pytest.param({"local_steps": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_an_island_dies_and_another_one_joins(settings):
    found = run_processes(
        (ISLANDS + 1) * SIZE,
        member_or_joiner,
        settings,
        may_die=(DIES,),
        grouped=False,
    )
    living = [each for each in found if each is not None]
    assert [rank for *_, rank in living] == [0, 0, 2, 2, 3, 3]
    assert all(consensus == living[0][0] for consensus, *_ in living)
    for first, second in zip(living[::2], living[1::2], strict=True):
        assert first[1] == second[1]
