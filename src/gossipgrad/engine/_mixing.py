"""The arithmetic of mixing: `v += weight * delta`, in fp32 where `v` is narrower."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["delta_of", "mix", "replace"]


def delta_of(
    received: Tensor, snapshot: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return `received - snapshot` in `dtype`, shape `(numel,)`.

    It is computed in `out`, of that type; by default in `received` if that is of it.
    """
    if received.dtype == dtype:
        return torch.sub(received, snapshot, out=received if out is None else out)
    wide = received.to(dtype) if out is None else out.copy_(received)
    return wide.sub_(snapshot)


def mix(
    tensors: Sequence[Tensor],
    deltas: Sequence[Tensor],
    weight: float,
    residuals: Sequence[Tensor | None],
) -> None:
    """Compute `v += weight * delta` for every tensor, each of the shape of its delta.

    A tensor narrower than fp32 is widened first; its residual gets the rounding error.
    """
    wide = [i for i, v in enumerate(tensors) if v.dtype == deltas[i].dtype]
    if wide:
        torch._foreach_add_([tensors[i] for i in wide], [deltas[i] for i in wide], alpha=weight)
    for v, delta, residual in zip(tensors, deltas, residuals, strict=True):
        if v.dtype != delta.dtype:
            total = v.to(delta.dtype) if residual is None else v.to(delta.dtype) + residual
            replace(v, total.add_(delta, alpha=weight), residual)


def replace(v: Tensor, total: Tensor, residual: Tensor | None) -> None:
    """Set `v = total` in the type of `v`; the residual gets the rounding error."""
    v.copy_(total)
    if residual is not None:
        residual.copy_(total - v.to(total.dtype))
