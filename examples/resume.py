"""Save checkpoints, and continue from the newest one bit for bit. Run it twice.

torchrun --nproc-per-node 4 examples/resume.py
"""

import torch
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad import checkpoint
from gossipgrad.data import load_digits

if is_torchelastic_launched():
    init_process_group("gloo")

FOLDER = "resume/checkpoints"  # all ranks share it
x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with gg.gossip(model, optimizer) as session:
    rank, world_size = session.rank, session.world_size
    mine = torch.arange(rank, 1500, world_size)
    done = min(session.agree(checkpoint.latest(FOLDER) or 0))  # what all ranks can read
    checkpoint.rewind(FOLDER, rank=rank, step=done)
    if done:
        session.load_state_dict(checkpoint.load(FOLDER, rank=rank, step=done))
    with checkpoint.Saver(FOLDER, rank=rank, world_size=world_size) as saver:
        for step in range(done + 1, done + 151):
            generator = torch.Generator().manual_seed(step)  # the same rows in a resumed run
            rows = mine[torch.randint(len(mine), (32,), generator=generator)]
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:  # written in the background
                saver.save(session.state_dict(copy=False), step=step, wait_seconds=10.0)
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()

if rank == 0:
    print(f"accuracy of the consensus {accuracy:.1%} after {step} steps")
