"""Accumulation, clipping, mixed precision, a schedule and an EMA: nothing changes.

torchrun --nproc-per-node 4 examples/full_loop.py
"""

import torch
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gossipgrad as gg
from gossipgrad.data import load_digits

if is_torchelastic_launched():
    init_process_group("gloo")

STEPS, PASSES = 200, 2
x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)

with gg.gossip(model, optimizer) as session:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # of this replica
    mine = torch.arange(session.rank, 1500, session.world_size)
    for _ in range(STEPS):
        for _ in range(PASSES):  # nothing is sent in these
            rows = mine[torch.randint(len(mine), (16,))]
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(x[rows]), y[rows]) / PASSES
            loss.backward()  # with a GradScaler: gg.gossip(..., scaler=scaler)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # one round of gossip
        optimizer.zero_grad()
        schedule.step()
        ema.update_parameters(model)
    with torch.no_grad():  # the average of all EMAs
        for parameter in ema.parameters():
            parameter.copy_(torch.tensor(session.agree(parameter.tolist())).mean(0))
    accuracy = (ema(x[1500:]).argmax(1) == y[1500:]).float().mean()

if session.rank == 0:
    print(f"accuracy of the EMA {accuracy:.1%}")
