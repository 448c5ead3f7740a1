"""Parameters split into blocks, and equal blocks stacked into units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from gossipgrad.comm import local, widened

__all__ = ["Block", "Unit", "cut", "make_units"]

_MOST_ELEMENTS = 2**20
"""Size of a unit: large enough to multiply small blocks together, and small enough that one unit
needs little memory, and that there are units to spread over a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of one parameter, as a matrix with at most as many rows as columns."""

    # Tensors of more than two dimensions are flattened to one row per first index. For a DTensor
    # the block is a part of this rank's shard.

    parameter: nn.Parameter  # the whole parameter
    number: int  # index among the parameter's blocks
    rows: slice  # rows of the parameter as a matrix
    columns: slice  # columns of the parameter as a matrix

    @property
    def is_turned(self) -> bool:
        """Whether the matrix is transposed."""
        return self.rows.stop - self.rows.start > self.columns.stop - self.columns.start

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, the smaller number first."""
        sizes = sorted(each.stop - each.start for each in (self.rows, self.columns))
        return sizes[0], sizes[1]

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape; a view if strides allow one."""
        part = _as_matrix(tensor)[self.rows, self.columns]
        return part.mT if self.is_turned else part


@dataclass(slots=True, eq=False)
class Unit:
    """Equal blocks of one group with stacked state: one product, one refresh, one location."""

    index: int  # index among the optimizer's units
    group: int  # index of the blocks' parameter group
    cohort: int  # index of the set of parameters that had their first gradient in the same step
    blocks: Sequence[Block]  # the blocks; all of one shape, type and device
    step: int = 0  # steps taken so far
    has_roots: bool = False  # whether its roots were computed; they are zeros before
    shape: tuple[int, int] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.blocks[0].shape
        self.dtype = widened(self.blocks[0].parameter.dtype)

    def gather(self, rows: Sequence[int]) -> Tensor:
        """Return the stacked gradients of these blocks; do not write to them."""
        parts = []
        for row in rows:
            block = self.blocks[row]
            assert block.parameter.grad is not None
            parts.append(block.of(local(block.parameter.grad)))
        if len(parts) == 1:
            return parts[0].to(self.dtype).unsqueeze(0)
        stack = torch.empty(len(parts), *self.shape, dtype=self.dtype, device=parts[0].device)
        for into, part in zip(stack, parts, strict=True):
            into.copy_(part)
        return stack


def cut(parameter: nn.Parameter, max_dim: int) -> list[Block]:
    """Return a parameter's blocks, of at most `max_dim` rows and columns, as equal as possible."""
    rows, columns = _as_matrix(local(parameter.detach())).shape
    pieces = [(r, c) for r in _pieces(rows, max_dim) for c in _pieces(columns, max_dim)]
    return [Block(parameter, number, r, c) for number, (r, c) in enumerate(pieces)]


def make_units(
    parameters: Iterable[nn.Parameter], max_dim: int, *, first: int, group: int, cohort: int
) -> list[Unit]:
    """Return units of the parameters' blocks; deterministic for the same parameters in order."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for parameter in parameters:
        for block in cut(parameter, max_dim):
            kind = block.shape, parameter.dtype, parameter.device
            alike.setdefault(kind, []).append(block)
    units: list[Unit] = []
    for blocks in alike.values():
        m, n = blocks[0].shape
        together = max(1, _MOST_ELEMENTS // (m * n))
        for begin in range(0, len(blocks), together):
            some = blocks[begin : begin + together]
            units.append(Unit(first + len(units), group, cohort, some))
    return units


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.flatten(1)


def _pieces(size: int, most: int) -> list[slice]:
    """Return as few slices of `size` indices as possible, with lengths that differ by at most 1."""
    count = -(-size // most)
    ends = [size * i // count for i in range(count + 1)] if count else []
    return [slice(a, b) for a, b in pairwise(ends)]
