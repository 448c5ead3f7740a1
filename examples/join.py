"""A worker joins a run that is training, from a second terminal.

torchrun --nproc-per-node 2 examples/join.py
python examples/join.py join.txt
"""

import sys
from pathlib import Path

import torch
from torch.distributed import init_process_group
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

if len(sys.argv) > 1:  # the joiner: no process group and no rank
    session = gg.join(model, optimizer, Path(sys.argv[1]).read_text())
else:
    init_process_group("gloo")
    session = gg.gossip(model, optimizer)
    if session.rank == 0:
        Path("join.txt").write_text(session.join_address())

print(f"rank {session.rank} begins at step {session.position}", flush=True)
generator = torch.Generator().manual_seed(session.rank)
last_step = None
while last_step is None or session.position < last_step:  # the steps of the run
    rows = torch.randint(1500, (32,), generator=generator)
    cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if last_step is None and len(session.membership.living) == 3:
        last_step = session.position + 1000
with session.consensus():
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
print(f"rank {session.rank}: accuracy of the consensus {accuracy:.1%}", flush=True)
session.close()
