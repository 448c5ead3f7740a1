"""The polar factor `U V^T` of matrices `U S V^T`, by Newton-Schulz iterations or exactly."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["POLARS", "Polar", "polarise", "product_dtype", "resolve_polar"]

Coefficients = tuple[float, float, float]
Polar = tuple[Coefficients, ...]
"""Coefficients of steps `X <- a X + b (X X^T) X + c (X X^T)^2 X`; empty: singular values."""

POLARS: dict[str, Polar] = {
    "muon": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar-express": (
        # The first of these takes 1.02 times the norm for the largest singular value.
        (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "svd": (),
}
"""Polar factors by name.

`"muon"` leaves singular values between about 0.7 and 1.2 and is what `torch.optim.Muon` does;
`"polar-express"` comes closer in as many products; `"svd"` is exact and slow.

References:
    Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/. Amsel et al., The Polar
    Express, arXiv:2505.16932.
"""

_MOST_ELEMENTS = 2**26  # of one stack: 256 MiB in fp32
_TINY = torch.finfo(torch.float32).tiny
_BLOCK_ROWS = 128  # of a symmetric product: smaller ones cost more for each operation
_LEAST_ROWS = 128  # smaller matrices are faster together than by fewer operations
_ALIGNED = 8  # elements
_SAME_GRAM = 5  # steps on one Gram matrix: after more, its rounding outgrows small singular values


def resolve_polar(polar: str | Sequence[Sequence[float]]) -> Polar:
    """Return the steps, given by name or coefficients.

    Raises:
        ValueError: The name is unknown, or a step does not have three coefficients.
    """
    if isinstance(polar, str) and polar in POLARS:
        return POLARS[polar]
    if isinstance(polar, str) or not isinstance(polar, Sequence):
        raise ValueError(
            f"polar={polar!r} is none of {', '.join(map(repr, POLARS))}, and no sequence of "
            "coefficients (a, b, c), one triple a step"
        )
    steps = tuple(tuple(float(c) for c in step) for step in polar)
    if wrong := [step for step in steps if len(step) != 3]:
        raise ValueError(f"polar has the step {wrong[0]}: a step is three coefficients (a, b, c)")
    return steps  # type: ignore[return-value]


@torch.no_grad()
def polarise(
    matrices: Sequence[Float[Tensor, "... _ _"]], polar: Polar, dtype: torch.dtype | None = None
) -> list[Float[Tensor, "... _ _"]]:
    """Return the polar factor of each matrix; zeros for a zero matrix. Inputs are not changed.

    The scale of a matrix does not matter. Equal shapes are multiplied together as one 3-D product;
    a tall matrix counts as a wide one.

    Args:
        matrices: Matrices of any shapes or stacks of them, on any devices.
        polar: The steps; empty: singular values, in at least fp32.
        dtype: Type of the products. None: bf16 on CUDA, else the matrices' own, at least fp32.

    Returns:
        New tensors in that type, in the order of the matrices.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(matrices):
        m, n = sorted(tensor.shape[-2:])
        for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
            wide = matrix if len(matrix) == m else matrix.mT
            alike.setdefault((m, n, tensor.device, tensor.dtype), []).append((index, wide))
    factors: list[list[Tensor]] = [[] for _ in matrices]
    for (m, n, *_), numbered in alike.items():
        most = max(1, _MOST_ELEMENTS // max(1, m * n))
        for begin in range(0, len(numbered), most):
            some = numbered[begin : begin + most]
            found = _polarise_stack([wide for _, wide in some], polar, dtype)
            for (index, _), factor in zip(some, found, strict=True):
                factors[index].append(factor)
    return [_as_before(*pair) for pair in zip(factors, matrices, strict=True)]


def product_dtype(matrix: Tensor, polar: Polar, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of the products, and of the factor."""
    if dtype is not None and polar:
        return dtype
    wide = torch.promote_types(matrix.dtype, torch.float32)
    return torch.bfloat16 if matrix.is_cuda and polar else wide


def _as_before(factors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the factors of wide matrices in the shape of the input."""
    whole = factors[0] if len(factors) == 1 else torch.stack(list(factors))
    is_tall = like.shape[-2] > like.shape[-1]
    return (whole.mT if is_tall else whole).reshape(like.shape)


def _polarise_stack(
    matrices: Sequence[Float[Tensor, "m n"]], polar: Polar, dtype: torch.dtype | None
) -> Sequence[Tensor]:
    """Return the factors of equal wide matrices."""
    one = matrices[0]
    wide, dtype = torch.promote_types(one.dtype, torch.float32), product_dtype(one, polar, dtype)
    m, n = one.shape
    if polar and dtype == wide and not one.is_cuda and m >= _LEAST_ROWS:
        found = [torch.empty_like(matrix, dtype=dtype) for matrix in matrices]
        _by_gram_matrices(matrices, polar, found)
        return found
    # The bits of a product depend on how a matrix is aligned in its stack, unless all are alike.
    rows, columns = (-(-side // _ALIGNED) * _ALIGNED for side in (m, n))
    stack = torch.zeros(len(matrices), rows, columns, dtype=wide, device=one.device)
    for into, matrix in zip(stack, matrices, strict=True):
        into[:m, :n] = matrix
    # By the largest element first: squares of huge and tiny ones are no numbers of fp32.
    largest = torch.linalg.vector_norm(stack, float("inf"), dim=(1, 2), keepdim=True)
    stack.div_(largest.clamp_(min=_TINY))
    if not polar:
        return _by_singular_values(stack[:, :m, :n]).unbind()
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    stack.div_(norms.clamp_(min=_TINY))
    return _newton_schulz(stack.to(dtype), polar)[:, :m, :n].unbind()


def _newton_schulz(x: Float[Tensor, "k m n"], polar: Polar) -> Float[Tensor, "k m n"]:
    """Apply the steps to a stack of wide matrices, in its own type."""
    for a, b, c in polar:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram_matrices(
    matrices: Sequence[Float[Tensor, "m n"]], polar: Polar, out: Sequence[Float[Tensor, "m n"]]
) -> None:
    """Write factors of wide matrices by products of m x m matrices: fewer operations.

    With `P_i = a I + b A + c A^2` a step is `X <- P_i X` and `A = X X^T <- P_i A P_i`. All are
    polynomials of one symmetric matrix, so are symmetric themselves, and `X` is multiplied once, at
    the end.
    """
    m, n = out[0].shape
    gram, p, product, spare = out[0].new_empty(4, m, m)
    flat = out[0].new_empty(m * n)
    for matrix, into in zip(matrices, out, strict=True):
        # In the order of memory, also of a tall matrix that is passed as a wide one.
        x = flat.view(n, m).T if matrix.stride(0) == 1 else flat.view(m, n)
        # By the largest element first: squares of huge and tiny ones are no numbers of fp32.
        x.copy_(matrix)
        least, most = torch.aminmax(flat)
        flat.div_(torch.maximum(-least, most).clamp_(min=_TINY))
        for begin in range(0, len(polar), _SAME_GRAM):
            steps = polar[begin : begin + _SAME_GRAM]
            _symmetric(x, x.T, gram)
            norm = None
            if begin == 0:
                square = gram.trace().clamp_(min=1.0)  # as the largest element is 1, or all are 0
                norm = square.sqrt()
                gram.div_(square)
            for step, (a, b, c) in enumerate(steps, 1):
                _symmetric(gram, gram, p, plus=gram, beta=b, alpha=c)
                p.diagonal().add_(a)
                if step == 1:
                    product.copy_(p)
                else:
                    _symmetric(p, product, spare)
                    product, spare = spare, product
                if step < len(steps):
                    _symmetric(p, gram, spare)
                    _symmetric(spare, p, gram)
            torch.mm(product if norm is None else product.div_(norm), x, out=into)
            if begin + _SAME_GRAM < len(polar):
                x.copy_(into)


def _symmetric(
    a: Float[Tensor, "m n"],
    b: Float[Tensor, "n m"],
    out: Float[Tensor, "m m"],
    *,
    plus: Float[Tensor, "m m"] | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """Compute `beta plus + alpha a b`, which is symmetric, by its lower triangle."""
    m = len(a)
    blocks = max(1, m // _BLOCK_ROWS)
    ends = [m * block // blocks for block in range(blocks + 1)]
    added = out if plus is None else plus  # with beta = 0 it is not read
    for begin, end in itertools.pairwise(ends):
        rows = slice(begin, end), slice(end)
        torch.addmm(added[rows], a[begin:end], b[:, :end], beta=beta, alpha=alpha, out=out[rows])
        out[:begin, begin:end] = out[begin:end, :begin].T


def _by_singular_values(x: Float[Tensor, "k m n"]) -> Float[Tensor, "k m n"]:
    """Return `U V^T` over the nonzero singular values."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    kept = s > s.amax(-1, keepdim=True) * (x.shape[-1] * torch.finfo(x.dtype).eps)
    return (u * kept.unsqueeze(-2).to(x.dtype)) @ vh
