"""Local steps over a slow link: exchange once in 20 steps, a twentieth of the bytes.

torchrun --nproc-per-node 4 examples/local_steps.py
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# The change of 20 steps is one step of an outer optimizer, whose weights are mixed.
settings = {"mode": "sync", "local_steps": 20, "wire_dtype": torch.bfloat16}
with gg.gossip(model, optimizer, **settings) as session:
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(400):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if session.rank == 0:
    print(f"accuracy of the consensus {accuracy:.1%}")
    print(session.stats())
