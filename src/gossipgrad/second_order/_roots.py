"""Eigenbases and inverse roots of stacks of symmetric positive semidefinite matrices."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["eigenbasis", "inverse_root", "newton_inverse_root", "power_step"]

Stack = Float[Tensor, "k n n"]

_JITTER = (0.0, 1e-10, 1e-6)
_MOST_STEPS = 30  # 19 are needed at a condition number of 1e6
_TOLERANCE = 1e-6
_HIGHEST_ERROR = 1e-2


def eigenbasis(matrices: Stack) -> Stack:
    """Return eigenvectors as columns, by descending eigenvalue; in the matrices' own type.

    Computed in fp64 on the host, see `inverse_root` for the jitter.
    """
    return _eigh(matrices)[1].flip(-1).to(matrices)


def power_step(
    matrices: Stack, basis: Stack, *, is_sorted: bool
) -> tuple[Stack, Int[Tensor, "k n"]]:
    """Make one step of orthogonal iteration: the Q of `matrices @ basis`, on their device.

    Args:
        matrices: The matrices.
        basis: Orthogonal matrices, near their eigenvectors.
        is_sorted: Whether columns are first ordered by their Rayleigh quotients, large ones first.

    Returns:
        The new bases, and the index of the old column of each new one.
    """
    product = matrices @ basis
    if is_sorted:
        order = (basis * product).sum(-2).argsort(-1, descending=True)
        product = product.gather(-1, order.unsqueeze(-2).expand_as(product))
    else:
        order = torch.arange(basis.shape[-1], device=basis.device).expand(len(basis), -1)
    return torch.linalg.qr(product)[0], order


def inverse_root(matrices: Stack, root: int, eps: float) -> Stack:
    """Return `(A + eps l I)^(-1 / root)`, l the largest eigenvalue of A; the identity for A = 0.

    By the eigenvalues in fp64 on the host, whatever the type of the matrices. Negative eigenvalues,
    which rounding can leave, count as 0. If LAPACK fails to converge, it is retried with 1e-10 and
    then 1e-6 of the mean eigenvalue added to the diagonal.

    Raises:
        RuntimeError: It still fails, or a matrix is not finite.
    """
    values, vectors = _eigh(matrices)
    largest = values[..., -1:].clamp(min=0)
    damped = values.clamp(min=0) + eps * largest
    damped = torch.where(largest > 0, damped, 1.0)
    return ((vectors * damped.pow(-1 / root).unsqueeze(-2)) @ vectors.mT).to(matrices)


def newton_inverse_root(matrices: Stack, root: int, eps: float) -> Stack:
    """Compute the same by coupled Newton iterations in the matrices' own type, on their device.

    It needs only products, so it suits a GPU; l is a bound, the Frobenius norm. It loses digits
    with the condition number: the error is about 2e-4 at 1e5 in fp32, where `inverse_root` has
    2e-5.

    Returns:
        The roots; NaN for matrices for which it did not converge.

    References:
        Guo, Higham, A Schur-Newton method for the matrix p-th root and its inverse, 2006.
        Anil et al., Scalable second order optimization, arXiv:2002.09018.
    """
    n = matrices.shape[-1]
    eye = torch.eye(n, dtype=matrices.dtype, device=matrices.device)
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    norms = torch.where(norms > 0, norms, 1.0)
    is_zero = torch.linalg.matrix_norm(matrices, keepdim=True) == 0
    damped = torch.where(is_zero, eye, matrices / norms + eps * eye)
    scale = (1 + root) / (2 * torch.linalg.matrix_norm(damped, keepdim=True))
    m, x = damped * scale, eye * scale.pow(1 / root)
    best = torch.full((len(matrices), 1, 1), torch.inf, dtype=m.dtype, device=m.device)
    found = torch.full_like(x, torch.nan)
    for _ in range(_MOST_STEPS):
        error = (m - eye).abs().amax((-2, -1), keepdim=True)
        is_better = error < best
        found, best = torch.where(is_better, x, found), torch.where(is_better, error, best)
        # The error may rise before it falls, so only one that is low already ends it by rising.
        if not ((best > _TOLERANCE) & (is_better | (best > _HIGHEST_ERROR))).any():
            break
        t = ((1 + 1 / root) * eye) - m / root
        x, m = x @ t, torch.linalg.matrix_power(t, root) @ m
    found = torch.where(best < _HIGHEST_ERROR, found, torch.nan)
    return torch.where(is_zero, eye, found * norms.pow(-1 / root))


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors, in fp64 on the host."""
    wide = matrices.detach().to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise RuntimeError("a factor is not finite: a gradient was not")
    error: Exception | None = None
    for jitter in _JITTER:
        mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(wide.shape[-1], dtype=wide.dtype)
        try:
            values, vectors = torch.linalg.eigh(wide + jitter * mean * eye if jitter else wide)
        except torch.linalg.LinAlgError as failed:
            error = failed
            continue
        return values, vectors
    raise RuntimeError(f"no eigenvalues were found: {error}") from error
