"""Shampoo: inverse roots of Kronecker factors, grafted to the norm of Adam's step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossipgrad._messages import warn
from gossipgrad.optim import Parameters
from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import SecondOrder, check_fraction, check_sizes
from gossipgrad.second_order._refresh import Background, Policy
from gossipgrad.second_order._roots import inverse_root, newton_inverse_root
from gossipgrad.second_order._symmetric import add_gram, packed_shape, unpack
from gossipgrad.second_order._tiers import Tiers

__all__ = ["Shampoo"]

_FACTORS = ("left", "right")
_ROOTS = ("left_root", "right_root")
_GRAFTS = ("adam", "none")
_METHODS = {"eigh": inverse_root, "newton": newton_inverse_root}


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
    $m (m + 1) / 2 + n (n + 1) / 2$ of factors and $m^2 + n^2$ of roots for an m x n block.

    Args:
        params: See `gg.SOAP`; the role is `"shampoo"`.
        lr: Learning rate of all parameters.
        betas: $b_1$ and $b_2$, also of AdamW.
        shampoo_beta: $b$; None: $b_2$.
        damping: Added to all eigenvalues of a factor, times the largest one.
        graft: `"adam"`, or `"none"`: use D itself.
        root_method: `"eigh"`, in fp64 on the host; or `"newton"`, coupled Newton iterations on the
            parameters' device in their type, which needs a `damping` of 1e-5 or more, and products
            in fp32: it warns of TF32, which `torch.set_float32_matmul_precision("high")` allows.
        eps: Adam's eps, also of AdamW.
        weight_decay: Decoupled weight decay of all parameters.
        max_dim: Largest dimension of blocks, at least 1.
        refresh: When and where roots are computed: `Synchronous` (default), `Staggered`,
            `Background`.
        storage: Tiers of the state; None: on the parameters' device.
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
        directions that had no gradient when it was computed; (3) grafting per block.
    """

    role = "shampoo"
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
        root_method: str = "eigh",
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_dim: int = 2048,
        refresh: Policy | None = None,
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
            storage=storage,
            matrices=matrices,
            adamw=adamw,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        """See the base."""
        check_fraction(group, "shampoo_beta")
        check_sizes(group, "damping", "max_dim")
        for name, known in (("graft", _GRAFTS), ("root_method", tuple(_METHODS))):
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} must be one of {known}")
        if group["root_method"] == "newton" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            warn(
                'root_method="newton" with TF32 products makes roots that are wrong by percents on '
                'GPUs: call torch.set_float32_matmul_precision("highest"), or give '
                'root_method="eigh"'
            )
        if group["graft"] == "none" and self.may_lack_roots:
            raise ValueError("on_bound='graft-only' needs graft='adam'")

    def describe_group(self, group: Mapping[str, Any]) -> list[str]:
        """See the base."""
        betas = f"betas {tuple(group['betas'])}"
        shampoo = [] if group["shampoo_beta"] is None else [f"factors {group['shampoo_beta']:g}"]
        roots = f"damping {group['damping']:g}, graft {group['graft']}, {group['root_method']}"
        return [betas, *shampoo, roots, *self.describe_blocks(group)]

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        m, n = unit.shape
        moment: dict[str, tuple[int, ...]] = {"moment": (m, n)}
        graft = {} if self.param_groups[unit.group]["graft"] == "none" else {"square": unit.shape}
        factors: dict[str, tuple[int, ...]] = {"left": packed_shape(m), "right": packed_shape(n)}
        return moment | factors | {"left_root": (m, m), "right_root": (n, n)} | graft

    def update_unit(
        self, unit: Unit, group: Mapping[str, Any], gradient: Tensor, rows: Sequence[int] | None
    ) -> tuple[Tensor, float] | None:
        """See the base."""
        b1, b2 = group["betas"]
        b, count = self._beta(group), unit.step + 1
        with self.use(unit, _FACTORS, rows) as (left, right):
            add_gram(left, gradient, b, 1 - b)
            add_gram(right, gradient.mT, b, 1 - b)
        root = self.renew(unit, group, unit.step)
        with self.use(unit, ["moment"], rows) as (moment,):
            moment.lerp_(gradient, 1 - b1)
            mean = moment / (1 - b1**count)
        graft = None
        if group["graft"] == "adam":
            with self.use(unit, ["square"], rows) as (square,):
                square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
                graft = mean / (square / (1 - b2**count)).sqrt_().add_(group["eps"])
        if root is None:
            assert graft is not None
            return graft, 1.0
        with self.use(unit, _ROOTS, rows, is_written=False) as (left, right):
            direction = left @ mean @ right
        if graft is not None:
            length = torch.linalg.matrix_norm(direction, keepdim=True)
            wanted = torch.linalg.matrix_norm(graft, keepdim=True)
            direction.mul_(torch.where(length > 0, wanted / length, 0.0))
        return direction, 1.0

    def make_job(self, unit: Unit, group: Mapping[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
        """See the base."""
        factors = self.snapshot(unit, *_FACTORS)
        correction = 1 - self._beta(group) ** (unit.step + 1)
        find = partial(_METHODS[group["root_method"]], root=4, eps=group["damping"])
        return lambda: tuple(find(unpack(factor / correction)) for factor in factors)

    def apply_root(self, unit: Unit, value: tuple[Tensor, ...]) -> None:
        """See the base."""
        device = unit.blocks[0].parameter.device
        old = _ROOTS if unit.has_roots else ()
        with self.use(unit, old, is_written=False):  # on the device first: then both are replaced
            for name, root in zip(_ROOTS, value, strict=True):
                self.put(unit, name, root.to(device))

    @property
    def may_lack_roots(self) -> bool:
        """Whether a step is possible without roots."""
        return isinstance(self.refresh, Background) and self.refresh.on_bound == "graft-only"

    @staticmethod
    def _beta(group: Mapping[str, Any]) -> float:
        return group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
