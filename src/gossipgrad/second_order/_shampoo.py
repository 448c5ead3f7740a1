"""Shampoo: inverse roots of Kronecker factors, grafted to the norm of Adam's step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossipgrad.optim import Parameters, is_number
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import FACTORS, SecondOrder, factor_beta
from gossipgrad.second_order._refresh import Refresh, Value
from gossipgrad.second_order._roots import ROOTS
from gossipgrad.second_order._symmetric import add_gram
from gossipgrad.second_order._tiers import Tiers

__all__ = ["Shampoo"]

_GRAFTS = ("adam", "none")


class Shampoo(SecondOrder):
    r"""Inverse fourth roots of Kronecker factors for matrices, AdamW for the rest.

    With $G$ the gradient of a block, in every step:

    .. math::
        L \leftarrow b L + (1 - b) G G^T, \quad R \leftarrow b R + (1 - b) G^T G, \quad
        M \leftarrow b_1 M + (1 - b_1) G, \\
        D = L^{-1/4} M R^{-1/4}, \quad
        X \leftarrow X - \text{lr} \, (D \, \|A\| / \|D\| + \text{weight\_decay} \cdot X)

    where $A$ is Adam's step of the block, with $b_1$ and $b_2$ (grafting), all with bias
    correction. Roots are computed when `refresh` says so, from the factors of the same step.

    Blocks, state and DTensors are as in `gg.SOAP`: $2 m n$ of moments ($m n$ without grafting),
    about $5 / 8 (m^2 + n^2)$ of factors and $m^2 + n^2$ of roots for an m x n block.

    Args:
        params: See `gg.SOAP`; the role is `"shampoo"`.
        lr: Learning rate of all parameters.
        betas: $b_1$ and $b_2$, also of AdamW.
        shampoo_beta: $b$; None: $b_2$.
        damping: Added to all eigenvalues of a factor, times the largest one.
        graft: `"adam"`, or `"none"`: use D itself.
        root_method: `"newton"`, coupled Newton iterations; `"newton-db"`, coupled square roots,
            with more products and more digits; `"eigh"`, LAPACK's eigenvalues, which makes
            `where="auto"` the host; or `"auto"`: `"eigh"` on the host, else `"newton"`. Products
            are in fp32, whatever `torch.set_float32_matmul_precision` says.
        eps: Adam's eps, also of AdamW.
        weight_decay: Decoupled weight decay of all parameters.
        max_dim: Largest dimension of blocks, at least 1.
        refresh: See `gg.SOAP`.
        root_dtype: See `gg.SOAP`.
        storage: See `gg.SOAP`.
        matrices: Patterns of names that Shampoo always updates.
        adamw: Patterns of names that AdamW always updates.

    Raises:
        ValueError: See `gg.SOAP`.

    References:
        Gupta et al., Shampoo: Preconditioned stochastic tensor optimization, arXiv:1802.09568,
        Algorithm 1; Anil et al., Scalable second order optimization, arXiv:2002.09018; Shi et al.,
        A distributed data-parallel PyTorch implementation of Distributed Shampoo, arXiv:2309.06497.
        Deviations: (1) means of the factors instead of sums, as Shi et al.; (2) damping relative to
        the largest eigenvalue, where Shi et al. add 1e-12: a stale root then does not blow up
        directions that had no gradient when it was computed; (3) grafting per block; (4) left and
        right roots change in different steps.
    """

    role = "shampoo"
    roots = ("left_root", "right_root")
    averaged = ("left", "right", "moment", "square")

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        shampoo_beta: float | None = None,
        damping: float = 1e-6,
        graft: str = "adam",
        root_method: str = "auto",
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
        own = {"shampoo_beta": shampoo_beta, "max_dim": max_dim, "damping": damping}
        super().__init__(
            params,
            settings=adam | own | {"graft": graft, "root_method": root_method},
            adamw_settings=adam,
            weight_decay=weight_decay,
            refresh=refresh,
            root_dtype=root_dtype,
            storage=storage,
            matrices=matrices,
            adamw=adamw,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        """See the base."""
        super().check_group(group)
        if not (is_number(group["damping"]) and 0 < group["damping"] < math.inf):
            raise ValueError(f"damping={group['damping']!r} must be a positive number")
        for name, known in (("graft", _GRAFTS), ("root_method", ("auto", *ROOTS))):
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} must be one of {known}")
        if group["root_method"] == "eigh" and self.refresh.where == "auto":
            self.refresh = self.refresher.policy = replace(self.refresh, where="host")
        if group["root_method"] == "eigh" and self.refresh.where == "device":
            raise ValueError(
                'root_method="eigh" would make the device wait for the host: give "newton", or '
                'Refresh(where="host")'
            )

    def describe_group(self, group: Mapping[str, Any]) -> list[str]:
        """See the base."""
        roots = f"damping {group['damping']:g}, graft {group['graft']}, {group['root_method']}"
        return [*super().describe_group(group), roots]

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        square = {} if self.param_groups[unit.group]["graft"] == "none" else {"square": unit.shape}
        return {"moment": unit.shape, **super().shapes(unit), **square}

    def update_unit(
        self, unit: Unit, group: Mapping[str, Any], gradient: Tensor, rows: Sequence[int] | None
    ) -> tuple[Tensor, float] | None:
        """See the base."""
        (b1, b2), b, count = group["betas"], factor_beta(group), unit.step + 1
        with self.use(unit, FACTORS, rows) as (left, right):
            add_gram(left, gradient, b, 1 - b)
            add_gram(right, gradient.mT, b, 1 - b)
        self.renew(unit, group)
        with self.use(unit, ["moment"], rows) as (moment,):
            moment.lerp_(gradient, 1 - b1)
            mean = moment / (1 - b1**count)
        left, right = self.current_roots(unit, rows)
        direction = left @ mean @ right
        if group["graft"] == "adam":
            with self.use(unit, ["square"], rows) as (square,):
                square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
                graft = mean.div_((square / (1 - b2**count)).sqrt_().add_(group["eps"]))
            length = torch.linalg.matrix_norm(direction, keepdim=True)
            wanted = torch.linalg.matrix_norm(graft, keepdim=True)
            direction.mul_(torch.where(length > 0, wanted / length, 0.0))
        return direction, 1.0

    def find_roots(self, unit: Unit, group: Mapping[str, Any]) -> Callable[..., Value]:
        """See the base."""
        return partial(
            _find,
            correction=1 - factor_beta(group) ** (unit.step + 1),
            method=group["root_method"],
            eps=group["damping"],
        )


def _find(
    factor: Tensor, old: Tensor, *, correction: float, method: str, eps: float, on_host: bool
) -> Value:
    if method == "auto":
        method = "eigh" if on_host else "newton"
    return (ROOTS[method](factor / correction, eps),)
