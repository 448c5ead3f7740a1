"""Means over ranks: what a replica shows of them all, and how far it is from them."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["distance_to_mean", "mean_buffers", "widened"]

Mean = Callable[[Tensor], Tensor]
"""Makes a tensor its mean over ranks, in place, and returns it; a collective."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and differences of tensors of `dtype` are made in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def mean_buffers(model: nn.Module, mean: Mean) -> Iterator[None]:
    """Inside, floating buffers (BatchNorm's statistics) are the mean over ranks; outside, own ones.

    A collective to enter, local to leave; they are this rank's own again also where it fails.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.is_floating_point()]
    try:
        with torch.no_grad():
            for buffer, own in kept:
                buffer.copy_(mean(own.to(widened(own.dtype), copy=True)))
        yield
    finally:
        with torch.no_grad():
            for buffer, own in kept:
                buffer.copy_(own)


@torch.no_grad()
def distance_to_mean(pairs: Iterable[tuple[Tensor, Tensor]], mean: Mean) -> float:
    """Root mean square over ranks of the distance between a rank's weights and their mean.

    Args:
        pairs: Weights of this rank and their mean over all, piece by piece.
        mean: Takes that of the ranks' squared distances: a collective.
    """
    square = torch.zeros(1, dtype=torch.float64)
    for own, average in pairs:
        square += (own - average).square().sum(dtype=torch.float64).cpu()
    return math.sqrt(float(mean(square)))
