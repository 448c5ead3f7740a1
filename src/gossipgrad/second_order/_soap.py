"""SOAP: Adam in the eigenbases of Shampoo's factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.optim import Parameters
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._eigenbasis import Eigenbasis
from gossipgrad.second_order._optimizer import FACTORS, factor_beta
from gossipgrad.second_order._refresh import Refresh
from gossipgrad.second_order._symmetric import add_gram
from gossipgrad.second_order._tiers import Tiers

__all__ = ["SOAP"]


class SOAP(Eigenbasis):
    r"""Adam in the eigenbases of Shampoo's factors for matrices, AdamW for the rest.

    With $G$ the gradient of a block, $Q_L$ and $Q_R$ the eigenbases of $L$ and $R$:

    .. math::
        P = Q_L^T G Q_R, \quad M \leftarrow b_1 M + (1 - b_1) P, \quad
        V \leftarrow b_2 V + (1 - b_2) P^2, \\
        X \leftarrow X - \text{lr} \, (c \, Q_L \frac{M}{\sqrt V + \text{eps}} Q_R^T
        + \text{weight\_decay} \cdot X), \\
        L \leftarrow b L + (1 - b) G G^T, \quad R \leftarrow b R + (1 - b) G^T G

    with $c$ Adam's bias correction. The first step of a block initialises $L$ and $R$ without an
    update. The bases start as the identity; in the second step, and later when `refresh` says so,
    each makes one step of orthogonal iteration with the factor of the steps before.

    Matrices are split into blocks of at most `max_dim` x `max_dim`, and convolution kernels
    flattened to one row per output; equal blocks are multiplied together. State is in fp32 (float64
    for float64 parameters): $2 m n$ of moments, about $5 / 8 (m^2 + n^2)$ of factors and
    $m^2 + n^2$ of bases for an m x n block. A DTensor (FSDP2) is split into blocks of each rank's
    shard, which needs no communication, but differs from the result on one rank.

    Args:
        params: The model, whose parameters are chosen by `matrices` and `adamw`, the type of their
            module, and their shape (see Note). Or the usual tensors, `(name, tensor)` pairs or
            groups, of which SOAP updates matrices whose names are not those of embeddings (all, and
            it warns, if they have none), except in groups with a `"role"`, `"soap"` or `"adamw"`.
        lr: Learning rate of all parameters.
        betas: $b_1$ and $b_2$, also of AdamW.
        shampoo_beta: $b$; None: $b_2$.
        eps: Added to the root, also of AdamW.
        weight_decay: Decoupled weight decay of all parameters.
        max_dim: Largest dimension of blocks, at least 1.
        refresh: When and where bases are computed, `gg.Refresh(every=10, delay=0)`.
        root_dtype: Type of stored bases, `torch.bfloat16` or `torch.float32`.
        storage: `gg.Tiers(host="pinned")` keeps bases in host memory.
        matrices: Patterns of names that SOAP always updates.
        adamw: Patterns of names that AdamW always updates.

    Raises:
        ValueError: If a number is out of range, no parameter has a name, or there is nothing to
            train.

    Note:
        AdamW updates vectors and scalars, the weights of `nn.Embedding` (and a head tied to one),
        and tensors of more than two dimensions that belong to no convolution.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 8))
        >>> gg.SOAP(model, weight_decay=0.0)
        SOAP (
          soap, lr 0.003: betas (0.95, 0.95), blocks of 2048, roots every 10, weight decay 0
            1.weight (8, 4)
          adamw, lr 0.003: betas (0.95, 0.95), eps 1e-08, weight decay 0
            0.weight (9, 4)
            1.bias (8,)
        )

    References:
        Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv:2409.11321,
        Algorithm 3, and its published code. Deviations: (1) blocks of `max_dim`, where the paper
        skips a side that is too large; (2) the mean of gradients is kept in the bases and rotated
        with them, as in the published code, where Algorithm 3 projects it in each step; (3) weight
        decay is applied before the update instead of after it; (4) AdamW updates vectors,
        embeddings and scalars; (5) the first bases are one step of orthogonal iteration from the
        identity instead of eigenvectors; (6) left and right bases change in different steps.
    """

    role = "soap"
    is_ordered = True
    reordered = ("square",)

    def __init__(
        self,
        params: Parameters,
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_dim: int = 2048,
        refresh: Refresh | None = None,
        root_dtype: torch.dtype | None = None,
        storage: Tiers | None = None,
        matrices: Sequence[str] = (),
        adamw: Sequence[str] = (),
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(
            params,
            settings=adam | {"shampoo_beta": shampoo_beta, "max_dim": max_dim},
            adamw_settings=adam,
            weight_decay=weight_decay,
            refresh=refresh,
            root_dtype=root_dtype,
            storage=storage,
            matrices=matrices,
            adamw=adamw,
        )

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        return super().shapes(unit) | {"square": unit.shape}

    def update_unit(
        self, unit: Unit, group: Mapping[str, Any], gradient: Tensor, rows: Sequence[int] | None
    ) -> tuple[Tensor, float] | None:
        """See the base."""
        (b1, b2), b = group["betas"], factor_beta(group)
        if unit.step == 0:
            with self.use(unit, FACTORS, rows) as factors:
                _add(factors, gradient, b)
            return None
        self.renew(unit, group)
        left, right = self.current_roots(unit, rows)
        with self.use(unit, ("moment", "square", *FACTORS), rows) as (moment, square, *factors):
            projected = left.mT @ gradient @ right
            moment.lerp_(projected, 1 - b1)
            square.mul_(b2).addcmul_(projected, projected, value=1 - b2)
            torch.sqrt(square, out=projected).add_(group["eps"])
            torch.div(moment, projected, out=projected)
            update = left @ projected @ right.mT
            _add(factors, gradient, b)
        return update, math.sqrt(1 - b2**unit.step) / (1 - b1**unit.step)


def _add(factors: Sequence[Tensor], gradient: Tensor, beta: float) -> None:
    left, right = factors
    add_gram(left, gradient, beta, 1 - beta)
    add_gram(right, gradient.mT, beta, 1 - beta)
