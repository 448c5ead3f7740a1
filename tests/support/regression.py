"""A small task that all ranks learn together."""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["batches"]


def batches(rank: int, count: int = 24, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a small regression task, other ones on each rank, one truth for all."""
    truth = torch.randn(6, 3, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, x @ truth
