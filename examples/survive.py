"""A worker is killed, and the others train on.

gossipgrad launch --nproc 4 examples/survive.py
"""

import os
import signal

import torch
from torch.distributed import init_process_group
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

init_process_group("gloo")  # torchrun would end all ranks; gossipgrad launch lets them live

x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with gg.gossip(model, optimizer) as session:
    mine = torch.arange(session.rank, 1500, session.world_size)
    for step in range(300):
        if step == 100 and session.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # as if the machine lost power
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():  # of those that live
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    members = session.membership

if session.rank == 0:
    print(f"accuracy of the consensus of ranks {members.living} {accuracy:.1%}")
    for rank, loss in members.lost.items():
        print(f"rank {rank} was lost: {loss.why}")
