"""KL-Shampoo: factors that whiten each other, and a preconditioner without Adam."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.optim import Parameters
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._eigenbasis import Eigenbasis
from gossipgrad.second_order._optimizer import FACTORS
from gossipgrad.second_order._refresh import Refresh
from gossipgrad.second_order._symmetric import add_gram
from gossipgrad.second_order._tiers import Tiers

__all__ = ["KLShampoo"]

_FIRST_VALUE = 0.1  # as published, for blocks whose first gradient is zero
_VALUES = ("left_values", "right_values")


class KLShampoo(Eigenbasis):
    r"""Shampoo with factors that are each other's maximum likelihood estimate; AdamW for the rest.

    With $G$ the m x n gradient of a block, $Q_L, d_L$ and $Q_R, d_R$ eigenbases and eigenvalues:

    .. math::
        P = Q_L^T G Q_R, \quad M \leftarrow b_1 M + (1 - b_1) P, \\
        X \leftarrow X - \text{lr} \, (Q_L (M \odot d_L^{-1/2} d_R^{-1/2 \, T}) Q_R^T
        + \text{weight\_decay} \cdot X), \\
        L \leftarrow b L + \tfrac{1 - b}{n} G Q_R d_R^{-1} Q_R^T G^T, \quad
        d_L \leftarrow b \, d_L + \tfrac{1 - b}{n} \text{diag}(P d_R^{-1} P^T)

    and the same for $R$ and $d_R$ with m. Eigenvalues start at the root mean square of the first
    gradient and change in every step, each with those of before the step; $d^{-1/2}$ is at most the
    number of rows (columns), itself taken between 10 and 4000. It uses no Adam, bias correction or
    grafting. First step, bases, blocks, state and DTensors are as in `gg.SOAP`, with $m + n$
    eigenvalues instead of $m n$ second moments.

    Args:
        params: See `gg.SOAP`; the role is `"kl_shampoo"`.
        lr: Learning rate of all parameters.
        betas: $b_1$ and $b$, also of AdamW.
        eps: $d_L^{-1/2} d_R^{-1/2}$ is divided by one and eps times itself; also of AdamW.
        weight_decay: Decoupled weight decay of all parameters.
        max_dim: Largest dimension of blocks, at least 1.
        refresh: See `gg.SOAP`.
        root_dtype: See `gg.SOAP`.
        storage: See `gg.SOAP`.
        matrices: Patterns of names that KL-Shampoo always updates.
        adamw: Patterns of names that AdamW always updates.

    Raises:
        ValueError: See `gg.SOAP`.

    References:
        Lin et al., Understanding and Improving the Shampoo Optimizer via Kullback-Leibler
        Minimization, 2025, and its published code, for matrices. Deviations: (1) blocks of
        `max_dim`; (2) the mean of gradients is kept in the bases and rotated with them; (3) fp32
        where the code has bf16; (4) weight decay is applied before the update instead of after it;
        (5) eigenvalues start at the scale of the gradient, not at 0.1: with that, steps are far too
        short for the first hundreds of steps where gradients are much smaller than 0.3; (6) first
        bases, and steps in which they change, as in `gg.SOAP`.
    """

    role = "kl_shampoo"
    is_ordered = False  # as published: eigenvalues stay with their columns

    def __init__(
        self,
        params: Parameters,
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
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
            settings=adam | {"max_dim": max_dim},
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
        m, n = unit.shape
        return super().shapes(unit) | {"left_values": (m,), "right_values": (n,)}

    def update_unit(
        self, unit: Unit, group: Mapping[str, Any], gradient: Tensor, rows: Sequence[int] | None
    ) -> tuple[Tensor, float] | None:
        """See the base."""
        (b1, b), (m, n) = group["betas"], unit.shape
        if unit.step == 0:
            with self.use(unit, (*FACTORS, *_VALUES), rows) as (left, right, *values):
                add_gram(left, gradient, b, (1 - b) / n)
                add_gram(right, gradient.mT, b, (1 - b) / m)
                scale = torch.linalg.vector_norm(gradient, dim=(1, 2)) / math.sqrt(m * n)
                scale = torch.where(scale > 0, scale, _FIRST_VALUE)
                for value, size in zip(values, (m, n), strict=True):
                    value.copy_(scale.unsqueeze(1).clamp(min=_lowest(size)))
            return None
        self.renew(unit, group)
        names = ("moment", *FACTORS, *_VALUES)
        q_l, q_r = self.current_roots(unit, rows)
        with self.use(unit, names, rows) as (moment, left, right, d_l, d_r):
            on_left, on_right = q_l.mT @ gradient, gradient @ q_r
            projected = on_left @ q_r
            moment.lerp_(projected, 1 - b1)
            root_l, root_r = d_l.rsqrt().unsqueeze(2), d_r.rsqrt().unsqueeze(1)
            scale = root_l * root_r
            scale.div_(1 + group["eps"] * scale).mul_(moment)
            update = q_l @ scale @ q_r.mT
            add_gram(left, on_right.mul_(root_r), b, (1 - b) / n)
            add_gram(right, on_left.mul_(root_l).mT, b, (1 - b) / m)
            squares = projected.square_()
            seen_l = (squares @ root_r.square().mT).squeeze(2).div_(n)
            seen_r = (root_l.square().mT @ squares).squeeze(1).div_(m)
            d_l.lerp_(seen_l, 1 - b).clamp_(min=_lowest(m))
            d_r.lerp_(seen_r, 1 - b).clamp_(min=_lowest(n))
        return update, 1.0


def _lowest(size: int) -> float:
    """Return inverse roots of eigenvalues, bounded as published."""
    return max(10, min(size, 4000)) ** -2.0
