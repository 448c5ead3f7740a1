"""Your own loop: gossip in two lines. The other examples are this one with a few lines changed.

torchrun --nproc-per-node 4 examples/loop.py
"""

import torch
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

if is_torchelastic_launched():  # by torchrun; plain python is one rank
    init_process_group("gloo")

x, y = load_digits()  # 1,797 rows of 64 pixels; the last 297 test
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with gg.gossip(model, optimizer) as session:  # the weights of rank 0 are copied to all
    mine = torch.arange(session.rank, 1500, session.world_size)  # this rank's share of the rows
    for _ in range(200):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()  # also a round of gossip
        optimizer.zero_grad()
    with session.consensus():  # the exact average of all replicas, taken back on exit
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if session.rank == 0:
    print(f"accuracy of the consensus {accuracy:.1%}")
    print(session.stats())
