"""Equal replicas over slow links: sparse gradients, merged and sent during backward (OMGS-SGD).

torchrun --nproc-per-node 4 examples/sparse.py
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# Dense where that is faster in this run, as it is for so small a model on one machine.
with gg.sparsify(model, optimizer, density=0.05) as session:
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(200):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()  # .grad is the mean over ranks
        optimizer.step()  # replicas stay equal, bit for bit
        optimizer.zero_grad()
    print(session.stats()) if session.rank == 0 else None
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if session.rank == 0:
    print(f"accuracy {accuracy:.1%}")
