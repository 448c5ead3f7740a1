"""Eigenbases and inverse roots of stacks of symmetric positive semidefinite matrices.

Those that run on a device are products, triangular solves and Cholesky factors of whole stacks, in
a fixed number of steps, so that the host waits for nothing. A matrix for which one fails gets NaN.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = [
    "ROOTS",
    "exact_products",
    "inverse_root",
    "newton_db_inverse_root",
    "newton_inverse_root",
    "power_step",
]

Stack = Float[Tensor, "k n n"]

_SHIFT = 1e-5  # of a factor, to the scale of its norm
_NEWTON_STEPS = 24  # 19 are needed at a condition number of 1e6
_DB_STEPS = (22, 14)  # of the square root, and of the square root of that
_HIGHEST_ERROR = 1e-2
_PADDING = 8
_ONE_AT_A_TIME = threading.Lock()


def power_step(
    matrices: Stack, basis: Stack, *, is_sorted: bool, on_host: bool
) -> tuple[Stack, Int[Tensor, "k n"]]:
    """Make one step of orthogonal iteration: the Q of `matrices @ basis`.

    Args:
        matrices: The matrices.
        basis: Orthogonal matrices, near their eigenvectors; at first the identity.
        is_sorted: Whether columns are first ordered by their Rayleigh quotients, large ones first.
        on_host: Whether to use LAPACK's Householder QR. Else `(A + 1e-5 |A| I) Q`, its columns at
            norm 1, becomes orthogonal by three Cholesky factors of their products, the first two of
            shifted ones. Two without shifts fail for rank-deficient factors of training.

    Returns:
        The new bases, and the index of the old column of each new one.

    References:
        Fukaya et al., Shifted Cholesky QR for computing the QR factorization of ill-conditioned
        matrices, 2020.
    """
    columns = basis.mT @ matrices  # of the product, as rows, for a symmetric matrix
    if is_sorted:
        order = (columns * basis.mT).sum(-1).argsort(-1, descending=True)
    else:
        order = torch.arange(basis.shape[-1], device=basis.device).expand(len(basis), -1)
    if on_host:
        return _orthogonal(columns, order), order
    scale = torch.linalg.matrix_norm(matrices, keepdim=True)
    columns = columns + _SHIFT * torch.where(scale > 0, scale, 1.0) * basis.mT
    if is_sorted:
        columns = columns.gather(-2, order.unsqueeze(-1).expand_as(columns))
    product = columns.mT
    shift = 8 * torch.finfo(product.dtype).eps * product.shape[-1]
    for added in (shift, shift, 0.0):
        product = product / torch.linalg.vector_norm(product, dim=-2, keepdim=True)
        gram = product.mT @ product
        gram.diagonal(dim1=-2, dim2=-1).add_(added)
        factor, info = torch.linalg.cholesky_ex(gram, upper=True)
        product = torch.linalg.solve_triangular(factor, product, upper=True, left=False)
        product = torch.where(info[:, None, None] == 0, product, torch.nan)
    return product, order


def inverse_root(matrices: Stack, eps: float) -> Stack:
    """Return `(A + eps l I)^(-1/4)`, l the largest eigenvalue of A; the identity for A = 0.

    By LAPACK's eigenvalues, on the host. Negative ones, which rounding can leave, count as 0.

    Raises:
        RuntimeError: LAPACK did not converge.
    """
    n = matrices.shape[-1]
    added = _PADDING if n % 512 == 0 else 0  # see `_orthogonal`: it saves a seventh of the time
    padded = nn.functional.pad(matrices, (0, added, 0, added))
    below_all = -torch.linalg.matrix_norm(matrices).clamp(min=1e-30).unsqueeze(-1)
    padded.diagonal(dim1=-2, dim2=-1)[..., n:] = below_all
    try:
        values, vectors = torch.linalg.eigh(padded)
    except torch.linalg.LinAlgError:
        values, vectors = (each.to(matrices) for each in torch.linalg.eigh(padded.double()))
    values, vectors = values[..., added:], vectors[..., :n, added:]
    largest = values[..., -1:].clamp(min=0)
    damped = values.clamp(min=0) + eps * largest
    damped = torch.where(largest > 0, damped, 1.0)
    return (vectors * damped.pow(-0.25).unsqueeze(-2)) @ vectors.mT


def newton_inverse_root(matrices: Stack, eps: float) -> Stack:
    """Compute the same by coupled Newton iterations; l is a bound, see `_scaled`.

    Whether it converged is judged at the end: the error of an ordinary matrix rises once before it
    falls. In fp32 the error of a root is about 1e-4 at a condition number of 1e5.

    References:
        Guo, Higham, A Schur-Newton method for the matrix p-th root and its inverse, 2006.
        Anil et al., Scalable second order optimization, arXiv:2002.09018.
    """
    damped, scale, is_zero, eye = _scaled(matrices, eps)
    first = 5 / (2 * (1 + eps))  # of eigenvalues up to 1 + eps
    m, x = damped * first, eye * first**0.25
    for _ in range(_NEWTON_STEPS):
        t = 1.25 * eye - 0.25 * m
        square = t @ t
        x, m = x @ t, square @ (square @ m)
    return _judged(x * scale.pow(-0.25), m, is_zero, eye)


def newton_db_inverse_root(matrices: Stack, eps: float) -> Stack:
    """Compute the same by two coupled square roots (Denman and Beavers, without inverses).

    More products than `newton_inverse_root`, and more digits.

    References:
        Higham, Stable iterations for the matrix square root, 1997. DASH: the published
        code of the batched form.
    """
    damped, scale, is_zero, eye = _scaled(matrices, eps)
    y = damped / (1 + eps)
    scale = scale * (1 + eps)
    z = m = eye
    for steps in _DB_STEPS:
        z = eye.expand_as(y)
        for _ in range(steps):
            m = z @ y
            t = 1.5 * eye - 0.5 * m
            y, z = y @ t, t @ z
    return _judged(z * scale.pow(-0.25), m, is_zero, eye)


ROOTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "eigh": inverse_root,
    "newton": newton_inverse_root,
    "newton-db": newton_db_inverse_root,
}


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply in fp32 inside, whatever the user has set: TF32 turns errors of 1e-5 into 3e-2.

    The setting is one of the process, so worker threads leave it alone.
    """
    libraries: Any = torch.backends.cuda, torch.backends.mkldnn
    backends = [library.matmul for library in libraries]
    with _ONE_AT_A_TIME:  # 1. A reads TF32. 2. B reads A's "ieee". 3. A restores. 4. B sets "ieee".
        before = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def _orthogonal(columns: Tensor, order: Tensor) -> Tensor:
    """Return the Q of each matrix, given its columns as rows and their order, by LAPACK."""
    n = columns.shape[-1]
    found = torch.empty_like(columns)
    # Rows of 1024 numbers, all at the same bits of an address, would share a part of the cache:
    # with eight zeros behind each, which change nothing, it takes two thirds of the time.
    padded = columns.new_zeros(n, n + _PADDING)
    for into, each, rows in zip(found, columns, order, strict=True):  # LAPACK takes no stacks
        torch.index_select(each, 0, rows, out=padded[:, :n])
        into.copy_(torch.linalg.householder_product(*torch.geqrf(padded.mT))[:n])
    return found


def _scaled(matrices: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A / l + eps I and l, a bound of the largest eigenvalue; whether A = 0; and I."""
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    rows = matrices.abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    norms = torch.minimum(norms, rows)
    is_zero = norms == 0
    norms = torch.where(is_zero, 1.0, norms)
    return torch.where(is_zero, eye, matrices / norms + eps * eye), norms, is_zero, eye


def _judged(found: Tensor, m: Tensor, is_zero: Tensor, eye: Tensor) -> Tensor:
    """Return roots where m is near the identity, the identity for A = 0, else NaN."""
    error = (m - eye).abs().amax((-2, -1), keepdim=True)
    return torch.where(is_zero, eye, torch.where(error < _HIGHEST_ERROR, found, torch.nan))
