"""From DistributedDataParallel: the wrapper goes, and replicas gossip instead.

torchrun --nproc-per-node 4 examples/from_ddp.py
"""

import torch
from torch.distributed import get_rank, get_world_size, init_process_group
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossipgrad as gg
from gossipgrad.data import load_digits

init_process_group("gloo")

x, y = load_digits()
train = TensorDataset(x[:1500], y[:1500])
sampler = DistributedSampler(train, get_world_size(), get_rank())  # shares stay as they are
loader = DataLoader(train, batch_size=32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
# model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = gg.gossip(model, optimizer)  # instead

for epoch in range(15):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

# if get_rank() == 0:  # replicas differ, so evaluate and save their average; all ranks take part
with session.consensus():
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
weights = session.consensus_state_dict()  # None on the other ranks
session.close()
if weights is not None:
    torch.save(weights, "from_ddp.pt")  # keys without DDP's "module."
    print(f"accuracy of the consensus {accuracy:.1%}")
