"""Long runs of the reference: what stays bounded, what drifts, what learns."""

import pytest
import torch
from torch import nn

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import by_name, hypercube
from support.vectors import sgd


class Flat(nn.Module):
    """A quadratic with as many flat directions as steep ones: nothing but gossip bounds those."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20))


def consensus_distances(payload: str, mode: str = "overlap", rounds: int = 300) -> list[float]:
    models: list[nn.Module] = [Flat() for _ in range(4)]
    curvature = torch.tensor([1.0, 0.0]).repeat_interleave(10)
    reference = Reference(
        models, sgd(models, lr=0.05), hypercube(4, rotate=False), mode=mode, payload=payload
    )
    generator = torch.Generator().manual_seed(0)
    distances = []
    for step in range(rounds):
        for model in models:
            model.w.grad = curvature * model.w.detach() + torch.randn(20, generator=generator)
        reference.step()
        if step % 3 == 2:
            distances.append(reference.consensus_distance())
    return distances


@pytest.mark.parametrize("mode", ["sync", "overlap", "lagged"])
def test_consensus_distance_stays_bounded_over_many_rounds(mode: str) -> None:
    distances = consensus_distances("weights", mode)
    assert max(distances[50:]) < 1.5 * max(distances[:50])
    assert max(distances) < 1.0


def test_gradients_alone_drift() -> None:
    distances = consensus_distances("gradients")
    assert distances[-1] > 5 * max(consensus_distances("weights", rounds=150))
    assert distances[-1] > 5 * max(consensus_distances("gradients+weights", rounds=150))
    assert distances[-1] > 2 * distances[len(distances) // 10]


def loss_at_step_50(mode: str, seed: int, lr: float = 0.2) -> float:
    """Mean over ranks of the loss of a small net on a fixed teacher's labels."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(512, 16, generator=generator)
    labels = (inputs @ torch.randn(16, 6, generator=generator)).argmax(1)
    models: list[nn.Module] = []
    for _ in range(4):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6)))
    loss = nn.CrossEntropyLoss()
    reference = Reference(models, sgd(models, lr=lr), by_name("dissemination", 4), mode=mode)
    for _ in range(50):
        for rank, model in enumerate(models):
            rows = rank * 128 + torch.randint(128, (16,), generator=generator)
            model.zero_grad()
            loss(model(inputs[rows]), labels[rows]).backward()
        reference.step()
    with torch.no_grad():
        return sum(loss(model(inputs), labels).item() for model in models) / 4


@pytest.mark.parametrize("seed", [0, 1])
def test_overlap_learns_as_fast_as_sync_and_lagged_at_half_the_rate(seed: int) -> None:
    sync = loss_at_step_50("sync", seed)
    lagged = loss_at_step_50("lagged", seed)
    assert loss_at_step_50("overlap", seed) == pytest.approx(sync, rel=0.02)
    assert lagged > 1.4 * sync
    assert lagged == pytest.approx(loss_at_step_50("sync", seed, lr=0.1), rel=0.02)
