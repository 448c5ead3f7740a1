"""Symmetric matrices in half the memory: LAPACK's rectangular full packed form.

A symmetric n x n matrix is split at h = ceil(n / 2) into A11 (h x h), A21 and A22 (r x r). Stored
are the lower triangle of A11 and the upper one of A22, which fill one rectangle of (r + 1) x h, and
A21 below it: n (n + 1) / 2 numbers, and products go straight into the parts, without an index. The
sum of x x^T costs three quarters of the whole product, because A12 is not computed, and less where
A11 and A22 are large enough to be halved in turn.

References:
    Gustavson et al., Rectangular full packed format for Cholesky's algorithm, 2010.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["add_gram", "pack", "packed_shape", "unpack"]

Packed = Float[Tensor, "k rows columns"]

_LEAST = 256
"""Rows from which half a product saved is worth three smaller ones."""


def packed_shape(n: int) -> tuple[int, int]:
    """Return rows and columns of the packed form of an n x n matrix."""
    h = (n + 1) // 2
    return 2 * (n - h) + 1, h


def add_gram(packed: Packed, x: Float[Tensor, "k n c"], beta: float, alpha: float) -> None:
    """Compute `A <- beta A + alpha x x^T` in place, for a stack of packed matrices."""
    a11, a22, a21 = _parts(packed)
    h = a11.shape[-1]
    top, bottom = x[:, :h], x[:, h:]
    packed[:, : packed.shape[1] - a21.shape[1]].mul_(beta)
    a11.add_(_lower_gram(top).tril_(), alpha=alpha)
    if a21.shape[1]:
        a22.add_(_lower_gram(bottom).mT.triu_(), alpha=alpha)
        a21.baddbmm_(bottom, top.mT, beta=beta, alpha=alpha)


def unpack(packed: Packed) -> Float[Tensor, "k n n"]:
    """Return new full matrices."""
    a11, a22, a21 = _parts(packed)
    h, r = a11.shape[-1], a22.shape[-1]
    whole = packed.new_empty(len(packed), h + r, h + r)
    whole[:, :h, :h] = _mirror(a11.tril())
    whole[:, h:, h:] = _mirror(a22.triu().mT)
    whole[:, h:, :h] = a21
    whole[:, :h, h:] = a21.mT
    return whole


def pack(whole: Float[Tensor, "k n n"]) -> Packed:
    """Return the packed form of symmetric matrices; reads only the lower triangle."""
    packed = whole.new_zeros(len(whole), *packed_shape(whole.shape[-1]))
    a11, a22, a21 = _parts(packed)
    h = a11.shape[-1]
    a11.add_(whole[:, :h, :h].tril())
    a22.add_(whole[:, h:, h:].tril().mT)
    a21.copy_(whole[:, h:, :h])
    return packed


def _parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views: A11, of which the lower triangle counts; A22, of which the upper one; A21."""
    rows, h = packed.shape[1:]
    r = rows // 2
    below = r + 1 - h  # the triangle of A11 is one row lower where n is even
    return packed[:, below : below + h], packed[:, :r, h - r :], packed[:, r + 1 :]


def _lower_gram(x: Float[Tensor, "k n c"]) -> Float[Tensor, "k n n"]:
    """Return a new `x x^T`; elements above the diagonal are undefined."""
    n = x.shape[1]
    if n < _LEAST:
        return x @ x.mT
    h = n // 2
    top, bottom = x[:, :h], x[:, h:]
    gram = x.new_empty(len(x), n, n)
    gram[:, :h, :h] = _lower_gram(top)
    gram[:, h:, h:] = _lower_gram(bottom)
    torch.bmm(bottom, top.mT, out=gram[:, h:, :h])
    return gram


def _mirror(lower: Tensor) -> Tensor:
    return lower + lower.tril(-1).mT
