"""The base of SOAP and KL-Shampoo: moments in eigenbases, rotated by a refresh."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import SecondOrder, check_sizes
from gossipgrad.second_order._refresh import Background
from gossipgrad.second_order._roots import eigenbasis, power_step
from gossipgrad.second_order._symmetric import packed_shape, unpack

__all__ = ["BASES", "FACTORS", "Eigenbasis"]

FACTORS = ("left", "right")
BASES = ("left_basis", "right_basis")


class Eigenbasis(SecondOrder):
    """Keeps the mean of gradients in the eigenbases of the factors."""

    # The first job of a unit is an eigendecomposition, later ones are a step of orthogonal
    # iteration from the bases of that time.

    is_sorted = True
    """Whether a refresh orders columns by their eigenvalues."""
    reordered: ClassVar[tuple[str, ...]] = ()
    """State of each pair of columns, which is permuted with them."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for settings out of range."""
        check_sizes(group, "max_dim")
        if isinstance(self.refresh, Background) and self.refresh.on_bound == "graft-only":
            raise ValueError(
                "on_bound='graft-only' needs grafting, which gg.Shampoo alone has: use 'block' or "
                "'synchronous'"
            )

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        m, n = unit.shape
        return {
            "moment": (m, n),
            "left": packed_shape(m),
            "right": packed_shape(n),
            "left_basis": (m, m),
            "right_basis": (n, n),
        }

    def make_job(self, unit: Unit, group: Mapping[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
        """See the base."""
        factors = self.snapshot(unit, *FACTORS)
        if not unit.has_roots:
            return partial(_first_bases, factors)
        with self.use(
            unit, BASES, is_written=False
        ) as bases:  # replaced as a whole, never modified
            bases = [basis.to(factors[0].device) for basis in bases]
        return partial(_next_bases, factors, bases, self.is_sorted)

    def root_parts(self, unit: Unit) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """See the base."""
        orders = [((len(unit.blocks), size), torch.int64) for size in unit.shape]
        return super().root_parts(unit) + orders

    def apply_root(self, unit: Unit, value: tuple[Tensor, ...]) -> None:
        """See the base."""
        device = unit.blocks[0].parameter.device
        left, right, left_order, right_order = (each.to(device) for each in value)
        new = dict(zip(BASES, (left, right), strict=True))
        if not unit.has_roots:
            for name, basis in new.items():
                self.put(unit, name, basis)
            return
        with (  # load everything before a write: a full disk leaves no partial update
            self.use(unit, BASES, is_written=False) as (old_left, old_right),
            self.use(unit, ("moment", *self.reordered)) as (moment, *others),
        ):
            # left to right is cheaper than products of bases
            moment.copy_(left.mT @ (old_left @ moment @ old_right.mT) @ right)
            for each in others:
                rows = each.gather(1, left_order.unsqueeze(2).expand_as(each))
                each.copy_(rows.gather(2, right_order.unsqueeze(1).expand_as(each)))
            for name, basis in new.items():
                self.put(unit, name, basis)


def _first_bases(factors: list[Tensor]) -> tuple[Tensor, ...]:
    bases = [eigenbasis(unpack(factor)) for factor in factors]
    orders = [torch.arange(b.shape[-1], device=b.device).expand(len(b), -1) for b in bases]
    return (*bases, *orders)


def _next_bases(factors: list[Tensor], bases: list[Tensor], is_sorted: bool) -> tuple[Tensor, ...]:
    (left, left_order), (right, right_order) = (
        power_step(unpack(factor), basis, is_sorted=is_sorted)
        for factor, basis in zip(factors, bases, strict=True)
    )
    return left, right, left_order, right_order
