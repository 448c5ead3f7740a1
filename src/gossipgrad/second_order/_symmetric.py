"""Symmetric matrices in about five eighths of the memory, to which products are added in place.

The columns of a symmetric n x n matrix are cut into four panels. Of each is stored what is not
below its diagonal block, panel under panel: (5 n / 2) x (n / 4) numbers. A product `x x^T` is added
by one multiplication a panel, straight into the stored numbers, at five eighths of its operations.
"""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

__all__ = ["add_gram", "packed_shape", "unpack"]

Packed = Float[Tensor, "k rows columns"]

_PANELS = 4
_LEAST = 32
"""Rows from which it is worth it."""


def packed_shape(n: int) -> tuple[int, int]:
    """Return rows and columns of the packed form of an n x n matrix."""
    width = -(-n // _PANELS) if n >= _LEAST else n
    return sum(range(width, n, width)) + n, width


def add_gram(packed: Packed, x: Float[Tensor, "k n c"], beta: float, alpha: float) -> None:
    """Compute `A <- beta A + alpha x x^T` in place, for a stack of packed matrices."""
    for panel, begin, end in _panels(packed, x.shape[1]):
        panel.baddbmm_(x[:, :end], x[:, begin:end].mT, beta=beta, alpha=alpha)


def unpack(packed: Packed, n: int) -> Float[Tensor, "k n n"]:
    """Return new full matrices."""
    whole = packed.new_empty(len(packed), n, n)
    for panel, begin, end in _panels(packed, n):
        whole[:, :end, begin:end] = panel
        whole[:, begin:end, :begin] = panel[:, :begin].mT
    return whole


def _panels(packed: Tensor, n: int) -> Iterator[tuple[Tensor, int, int]]:
    """Return views of the panels, with their first column and the one behind their last."""
    width, row = packed.shape[2], 0
    for begin in range(0, n, width):
        end = min(begin + width, n)
        yield packed[:, row : row + end, : end - begin], begin, end
        row += end
