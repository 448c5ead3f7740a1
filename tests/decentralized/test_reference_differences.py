"""The reference of CHOCO-SGD keeps the mean, and brings replicas together."""

import pytest
import torch
from torch import nn

from gossipgrad.decentralized._reference_differences import DifferenceReference
from gossipgrad.topology import by_name, complete

SCHEDULES = [by_name("ring", 4), complete(4)]


def replicas(lr):
    models = []
    for rank in range(4):
        torch.manual_seed(rank)
        models.append(nn.Linear(5, 4, dtype=torch.float64))
    return models, [torch.optim.SGD(model.parameters(), lr=lr) for model in models]


def stacked(reference):
    return torch.stack([torch.cat([v.detach().flatten() for v in w]) for w in reference.w])


def rest(reference, models, steps):
    for _ in range(steps):
        for model in models:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        reference.step()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["ring", "complete"])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_mean_is_kept_and_replicas_meet(schedule, mode):
    models, optimizers = replicas(lr=0.0)
    reference = DifferenceReference(models, optimizers, schedule, 0.25, 0.5, mode=mode)
    before = stacked(reference)
    rest(reference, models, 200)
    after = stacked(reference)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-12)
    assert (after - after.mean(0)).norm() < (before - before.mean(0)).norm() / 50
