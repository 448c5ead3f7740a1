"""Muon, decentralized: ranks exchange with neighbours only (SUDA-Muon).

torchrun --nproc-per-node 4 examples/muon.py
"""

import torch
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

if is_torchelastic_launched():
    init_process_group("gloo")

x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = gg.Muon(model, lr=0.02)  # the head and the biases use AdamW

with gg.suda(model, optimizer) as session:  # or gg.gossip, or DistributedDataParallel around it
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(200):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if session.rank == 0:
    print(optimizer)  # what is polarised, and what is not
    print(f"accuracy of the consensus {accuracy:.1%}")
