"""The base of SOAP and KL-Shampoo: moments in eigenbases, which a refresh rotates."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import SecondOrder
from gossipgrad.second_order._refresh import Value
from gossipgrad.second_order._roots import power_step

__all__ = ["Eigenbasis"]


class Eigenbasis(SecondOrder):
    """Keeps the mean of gradients in the eigenbases of the factors."""

    # Bases start as the identity; each refresh is a step of orthogonal iteration. As good a start
    # as eigenvectors, which would hold up the first step for seconds.

    roots = ("left_basis", "right_basis")
    first_call = 1
    reordered: ClassVar[tuple[str, ...]] = ()
    """State of each pair of columns, which is permuted with them."""

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        return {"moment": unit.shape, **super().shapes(unit)}

    def find_roots(self, unit: Unit, group: Mapping[str, Any]) -> Callable[..., Value]:
        """See the base."""
        return partial(_find, is_sorted=self.is_ordered)

    def change_root(self, unit: Unit, side: int, new: Tensor, order: Tensor | None) -> None:
        """Rotate moments into a new basis."""
        old, new = self.current_roots(unit)[side], new.to(unit.dtype)
        moment = unit.tensors["moment"]
        # left to right is cheaper than the product of bases
        moment.copy_(new.mT @ (old @ moment) if side == 0 else (moment @ old.mT) @ new)
        if order is not None:
            dim = 1 + side
            for name in self.reordered:
                each = unit.tensors[name]
                each.copy_(each.gather(dim, order.unsqueeze(2 - side).expand_as(each)))


def _find(factor: Tensor, old: Tensor, *, is_sorted: bool, on_host: bool) -> Value:
    new, order = power_step(factor, old, is_sorted=is_sorted, on_host=on_host)
    return (new, order) if is_sorted else (new,)
