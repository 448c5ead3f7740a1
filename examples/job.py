"""Your own model and data for the command, which has checkpoints, joining and a report page.

gossipgrad train --job examples.job:job --nproc 4 --epochs 10 --out runs/job
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from gossipgrad.data import load_digits
from gossipgrad.train import Job


def job() -> Job:
    """A perceptron on digits; the last 297 rows test."""
    x, y = load_digits()
    return Job(
        model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        train=TensorDataset(x[:1500], y[:1500]),
        test=TensorDataset(x[1500:], y[1500:]),
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
