"""Gradients as numbers: the type and the unit of their sums, and what is looked for in them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["all_finite", "all_minus_zero", "scale_of", "wide_bytes", "wide_dtype"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What residuals and sums of gradients of a type are kept in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def wide_bytes(parameter: Tensor) -> int:
    """Bytes of its gradient then."""
    return parameter.numel() * wide_dtype(parameter.dtype).itemsize


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """What gradients are multiples of: 1 where there is no scaler, or none that is enabled."""
    return 1.0 if scaler is None or not scaler.is_enabled() else scaler.get_scale()


def all_finite(grads: Iterable[Tensor | None]) -> bool:
    """By sums, in a type that sums of finite gradients do not overflow."""
    return all(
        math.isfinite(float(grad.sum(dtype=wide_dtype(grad.dtype))))
        for grad in grads
        if grad is not None
    )


def all_minus_zero(values: Tensor) -> bool:
    """Whether each is -0.0, which adding leaves no trace of."""
    return bool(((values == 0) & values.signbit()).all())
