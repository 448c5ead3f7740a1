"""Long runs of the reference: what stays bounded, what drifts, what learns."""

import pytest
import torch
from torch import nn

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import hypercube


class Flat(nn.Module):
    """A quadratic with as many flat directions as steep ones: nothing but gossip bounds those."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20))


def consensus_distances(payload: str, mode: str = "overlap", rounds: int = 300) -> list[float]:
    models: list[nn.Module] = [Flat() for _ in range(4)]
    curvature = torch.tensor([1.0, 0.0]).repeat_interleave(10)
    reference = Reference(
        models,
        [torch.optim.SGD(m.parameters(), lr=0.05) for m in models],
        hypercube(4, rotate=False),
        mode=mode,
        payload=payload,
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
