"""Means over ranks, and the distance of a replica from the mean."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["distance_to_mean", "mean_buffers", "widened"]

Mean = Callable[[Tensor], Tensor]
"""Replaces a tensor by its mean over ranks, in place, and returns it; a collective."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums and differences of tensors of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def mean_buffers(model: nn.Module, mean: Mean) -> Iterator[None]:
    """Replace floating buffers (BatchNorm's statistics) by their mean over ranks, inside.

    Entering is a collective, leaving is local. This rank's own values are restored on exit and on
    failure.
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
    """Return the root mean square over ranks of the distance of weights to their mean.

    Args:
        pairs: This rank's weights and their mean over all ranks, piece by piece.
        mean: Averages the squared distances over ranks; a collective.
    """
    square = torch.zeros(1, dtype=torch.float64)
    for own, average in pairs:
        square += (own - average).square().sum(dtype=torch.float64).cpu()
    return math.sqrt(float(mean(square)))
