"""A second-order optimizer under gossip: roots are spread over the steps.

torchrun --nproc-per-node 4 examples/soap.py
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
# A tenth of the roots in each step; with delay=5 threads compute them beside training.
optimizer = gg.SOAP(model, lr=3e-3, refresh=gg.Refresh(every=10))

with gg.gossip(model, optimizer) as session:
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(200):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
optimizer.close()

if session.rank == 0:
    print(f"accuracy of the consensus {accuracy:.1%}")
    print(optimizer.refresh_stats)
