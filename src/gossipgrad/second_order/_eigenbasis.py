"""The base of SOAP and KL-Shampoo: moments in eigenbases, which a refresh rotates."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gossipgrad.second_order._blocks import Unit
from gossipgrad.second_order._optimizer import SecondOrder
from gossipgrad.second_order._roots import power_step

__all__ = ["Eigenbasis"]


class Eigenbasis(SecondOrder):
    """Keeps the mean of gradients in the eigenbases of the factors."""

    # Bases start as the identity; each refresh is a step of orthogonal iteration. As good a start
    # as eigenvectors, which would hold up the first step for seconds.

    roots = ("left_basis", "right_basis")
    first_call = 1

    def shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        """See the base."""
        return {"moment": unit.shape, **super().shapes(unit)}

    def find_roots(self, unit: Unit, group: Mapping[str, Any]) -> Callable[..., Tensor]:
        """See the base."""
        return power_step

    def change_root(self, unit: Unit, side: int, new: Tensor) -> None:
        """Rotate moments into a new basis."""
        old, new = self.current_roots(unit)[side], new.to(unit.dtype)
        moment = unit.tensors["moment"]
        # left to right is cheaper than the product of bases
        moment.copy_(new.mT @ (old @ moment) if side == 0 else (moment @ old.mT) @ new)
