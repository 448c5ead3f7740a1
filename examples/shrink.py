"""A model that is too wide loses redundant neurons while it trains (neuron apoptosis).

torchrun --nproc-per-node 4 examples/shrink.py
"""

import torch
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

if is_torchelastic_launched():
    init_process_group("gloo")

x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with (
    gg.gossip(model, optimizer) as session,
    gg.shrink(
        model, optimizer, session=session, example_input=x[:32], every=50, events=3
    ) as shrinking,
):
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(250):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()  # parameters become smaller in some of these, on all ranks at once
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    widths = shrinking.widths()

if session.rank == 0:
    print(f"accuracy of the consensus {accuracy:.1%} with {widths} of 256 neurons")
