"""The polar factor `U V^T` of matrices `U S V^T`, by Newton-Schulz iterations or exactly."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["POLARS", "Polar", "flops", "polarise", "resolve_polar"]

Coefficients = tuple[float, float, float]
Polar = tuple[Coefficients, ...]
"""Coefficients of steps `X <- a X + b (X X^T) X + c (X X^T)^2 X`; empty: singular values."""

_SIMPLE = (3.4445, -4.7750, 2.0315)

POLARS: dict[str, Polar] = {
    "muon": (_SIMPLE,) * 5,
    "polar-express": (
        # The first of these takes 1.02 times the norm for the largest singular value.
        (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "deepseek": (_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    "svd": (),
}
"""Polar factors by name.

`"muon"` leaves singular values between about 0.7 and 1.2 and is what `torch.optim.Muon` does;
`"polar-express"` and `"cans"` come closer in as many products; `"deepseek"`, ten steps, is exact to
rounding in fp32 for condition numbers up to about 1e4; `"svd"` is exact and slow.

References:
    Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/. Amsel et al., The Polar
    Express, arXiv:2505.16932. Grishina et al.,
    Chebyshev-type Newton-Schulz (CANS), arXiv:2506.10935.
"""

_MOST_ELEMENTS = 2**26  # of one stack: 256 MiB in fp32, three times that while it is multiplied
_TINY = 1e-7
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
    matrices: Sequence[Float[Tensor, "_ _"]], polar: Polar, dtype: torch.dtype | None = None
) -> list[Float[Tensor, "_ _"]]:
    """Return the polar factor of each matrix; zeros for a zero matrix. Inputs are not changed.

    Equal shapes are multiplied together as one 3-D product; a tall matrix counts as a wide one.

    Args:
        matrices: Matrices of any shapes, on any devices.
        polar: The steps; empty: singular values, in at least fp32.
        dtype: Type of the products. None: bf16 on CUDA, else the matrices' own, at least fp32.

    Returns:
        New tensors in that type, in the order of the matrices.
    """
    stacks: dict[tuple[object, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        m, n = sorted(matrix.shape)
        stacks.setdefault((m, n, matrix.device, matrix.dtype), []).append(place)
    factors: list[Tensor | None] = [None] * len(matrices)
    for places in stacks.values():
        one = matrices[places[0]]
        together = max(1, _MOST_ELEMENTS // max(1, one.numel()))
        for begin in range(0, len(places), together):
            some = places[begin : begin + together]
            stack = _stacked([matrices[place] for place in some], polar, dtype)
            stack = _newton_schulz(stack, polar) if polar else _by_singular_values(stack)
            for place, factor in zip(some, stack, strict=True):
                factors[place] = factor.T if _is_tall(matrices[place]) else factor
    return [factor for factor in factors if factor is not None]


def flops(m: int, n: int, polar: Polar) -> tuple[int, int]:
    """Return the operations of the steps on one matrix: as usual, and as done here in fp32."""
    m, n = sorted((m, n))
    usual = len(polar) * (4 * m * m * n + 2 * m**3)
    here = 0
    for begin in range(0, len(polar), _SAME_GRAM):
        count = len(polar[begin : begin + _SAME_GRAM])
        here += 4 * m * m * n + (8 * count - 6) * m**3
    return usual, min(usual, here)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _stacked(matrices: Sequence[Tensor], polar: Polar, dtype: torch.dtype | None) -> Tensor:
    """Return a new stack of wide matrices, each divided by its Frobenius norm."""
    one = matrices[0]
    wide = torch.promote_types(one.dtype, torch.float32)
    if dtype is None or not polar:
        dtype = torch.bfloat16 if one.is_cuda and polar else wide
    m, n = sorted(one.shape)
    stack = torch.empty(len(matrices), m, n, dtype=wide, device=one.device)
    for into, matrix in zip(stack, matrices, strict=True):
        into.copy_(matrix.T if _is_tall(matrix) else matrix)
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    return stack.div_(norms.clamp_(min=_TINY)).to(dtype)


def _newton_schulz(x: Float[Tensor, "k m n"], polar: Polar) -> Float[Tensor, "k m n"]:
    """Apply the steps to a stack of wide matrices, in its own type."""
    *_, m, n = x.shape
    usual, on_gram = flops(m, n, polar)
    if on_gram < usual and x.dtype.itemsize >= 4:
        for begin in range(0, len(polar), _SAME_GRAM):
            x = _on_gram_matrix(x, polar[begin : begin + _SAME_GRAM])
        return x
    for a, b, c in polar:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _on_gram_matrix(x: Float[Tensor, "k m n"], polar: Polar) -> Float[Tensor, "k m n"]:
    """Apply the steps by products of m x m matrices: fewer operations if n is larger than m."""
    # With `P_i = a I + b A + c A^2` a step is `X <- P_i X` and `A = X X^T <- P_i A P_i`: all are
    # polynomials of one matrix, so `X` itself is multiplied once, at the end.
    gram, product = x @ x.mT, None
    for step, (a, b, c) in enumerate(polar, 1):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        product = p if product is None else p @ product
        if step < len(polar):
            gram = p @ gram @ p
    return x if product is None else product @ x


def _by_singular_values(x: Float[Tensor, "k m n"]) -> Float[Tensor, "k m n"]:
    """Return `U V^T` over the nonzero singular values."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    kept = s > s.amax(-1, keepdim=True) * (x.shape[-1] * torch.finfo(x.dtype).eps)
    return (u * kept.unsqueeze(-2).to(x.dtype)) @ vh
