"""Gradients as numbers: the type and the unit of their sums, and what is looked for in them."""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from gossipgrad.comm import widened

__all__ = ["all_finite", "all_minus_zero", "prevailing_dtype", "scale_of"]


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """What gradients are multiples of: 1 where there is no scaler, or none that is enabled."""
    return 1.0 if scaler is None or not scaler.is_enabled() else scaler.get_scale()


def prevailing_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """That of most elements."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += tensor.numel()
    return elements.most_common(1)[0][0]


def all_finite(grads: Iterable[Tensor | None]) -> bool:
    """By sums, in a type that sums of finite gradients do not overflow."""
    return all(
        math.isfinite(float(grad.sum(dtype=widened(grad.dtype))))
        for grad in grads
        if grad is not None
    )


def all_minus_zero(values: Tensor) -> bool:
    """Whether each is -0.0, which adding leaves no trace of."""
    return bool(((values == 0) & values.signbit()).all())
