"""Replicas that are sharded with FSDP2: two replicas of two ranks each.

torchrun --nproc-per-node 4 examples/fsdp2.py
"""

import torch
from torch.distributed import get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

init_process_group("gloo")

x, y = load_digits()
mesh = init_device_mesh("cpu", (get_world_size() // 2, 2), mesh_dim_names=("gossip", "shard"))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # after sharding

# Each rank exchanges its shards with the rank of the same coordinate in the partner's replica.
with gg.gossip(model, optimizer, mesh=mesh["gossip"]) as session:
    share = session.rank * 2 + mesh["shard"].get_local_rank()
    mine = torch.arange(share, 1500, get_world_size())
    for _ in range(200):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if share == 0:
    print(f"accuracy of the consensus {accuracy:.1%}")
