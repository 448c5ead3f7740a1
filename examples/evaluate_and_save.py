"""Evaluate on all ranks, each on its share of the test rows, and save one model.

torchrun --nproc-per-node 4 examples/evaluate_and_save.py
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
best = 0.0

with gg.gossip(model, optimizer) as session:
    mine = torch.arange(session.rank, 1500, session.world_size)
    test = torch.arange(1500 + session.rank, 1797, session.world_size)
    for step in range(1, 301):
        rows = mine[torch.randint(len(mine), (32,))]
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            with torch.inference_mode(), session.consensus():  # all ranks enter it
                right = int((model(x[test]).argmax(1) == y[test]).sum())
            accuracy = sum(session.agree(right)) / 297  # of all ranks, on each of them
            if accuracy > best:
                best = accuracy
                weights = session.consensus_state_dict()  # on rank 0; None on the others
                if weights is not None:
                    torch.save(weights, "best.pt")

if session.rank == 0:
    model.load_state_dict(torch.load("best.pt"))  # a plain state_dict, for any program
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"accuracy of the saved model {accuracy:.1%}")
