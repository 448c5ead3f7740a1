"""Means over ranks, and the distance of a replica from the mean."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["distance_to_mean", "mean_inside", "statistics", "widened"]

Mean = Callable[[Tensor], Tensor]
"""Replaces a tensor by its mean over ranks, in place, and returns it; a collective."""


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums and differences of tensors of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's running statistics by name: floating buffers named `running_...`.

    This is the rule for buffers in every collective that averages. Running statistics, such as
    BatchNorm's `running_mean` and `running_var`, are means over data, so their mean over ranks is
    one, too. Any other buffer stays each rank's own: a mean of unit vectors (spectral norm) is no
    unit vector, a sum of masks overflows, and caches have a length of their own on each rank.
    """
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
    }


@contextmanager
def mean_inside(tensors: Iterable[Tensor], mean: Mean) -> Iterator[None]:
    """Replace tensors by their mean over ranks, inside.

    Entering is a collective, leaving is local. This rank's own values are restored on exit and on
    failure.
    """
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        with torch.no_grad():
            for tensor, own in kept:
                tensor.copy_(mean(own.to(widened(own.dtype), copy=True)))
        yield
    finally:
        with torch.no_grad():
            for tensor, own in kept:
                tensor.copy_(own)


@torch.no_grad()
def distance_to_mean(pairs: Iterable[tuple[Tensor, Tensor]], mean: Mean) -> float:
    """Return the root mean square over ranks of the distance of weights to their mean.

    Args:
        pairs: This rank's weights and their mean over all ranks, piece by piece.
        mean: Averages the squared distances over ranks; a collective.
    """
    square = torch.zeros(1, dtype=torch.float64, device="cpu")
    for own, average in pairs:
        apart = torch.linalg.vector_norm(own.to(widened(own.dtype)) - average)
        square += apart.cpu().double().square()
    return math.sqrt(float(mean(square)))
