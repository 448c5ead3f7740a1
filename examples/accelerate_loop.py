"""Accelerate: a loop changes in four lines.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from gossipgrad.data import load_digits
from gossipgrad.integrations.accelerate import GossipSGD  # added

accelerator = Accelerator(cpu=True)
data = TensorDataset(*load_digits())
train = DataLoader(torch.utils.data.Subset(data, range(1500)), batch_size=32, shuffle=True)
test = DataLoader(torch.utils.data.Subset(data, range(1500, len(data))), batch_size=32)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * 10 * 24)
model = accelerator.prepare_model(model, evaluation_mode=True)  # added: no DDP around it
optimizer, train, test, scheduler = accelerator.prepare(optimizer, train, test, scheduler)
with GossipSGD(accelerator, model, optimizer) as gossip:  # added
    for epoch in range(10):
        model.train()
        for x, y in train:
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gossip.save_state(f"states/{epoch}")  # was: accelerator.save_state
model.eval()
right = []
with torch.no_grad():
    for x, y in test:
        right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y).float())
accelerator.save_model(model, "final")
accelerator.print(f"accuracy of the consensus {torch.cat(right).mean():.3f}")
