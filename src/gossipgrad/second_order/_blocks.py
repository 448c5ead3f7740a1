"""Parameters split into blocks, and equal blocks stacked into units."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.comm import is_sharded, local, widened
from gossipgrad.second_order._refresh import Job

__all__ = ["Block", "Unit", "cut", "make_units"]

_MOST_ELEMENTS, _MOST_ELEMENTS_ON_CPU = 2**20, 2**18
"""Size of a unit: large enough to multiply small blocks together, and small enough that one unit
needs little memory, and that there are units to spread over a window."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of one parameter, as a matrix with at most as many rows as columns."""

    # Tensors of more than two dimensions are flattened to one row per first index. For a DTensor
    # the block is a part of this rank's shard.

    parameter: nn.Parameter  # the whole parameter
    number: str  # index among the parameter's blocks, behind that of this rank's shard
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

    @contextmanager
    def open(self) -> Iterator[Tensor]:
        """Yield this part of the parameter; changes are kept, whatever its strides are."""
        whole = local(self.parameter)
        matrix = _as_matrix(whole)
        yield self.of(matrix)
        if matrix.data_ptr() != whole.data_ptr():  # channels last: the matrix was a copy
            whole.copy_(matrix.view(whole.shape))


@dataclass(slots=True, eq=False)
class Unit:
    """Equal blocks of one group with stacked state."""

    index: int  # index among the optimizer's units
    group: int  # index of the blocks' parameter group
    cohort: int  # index of the set of parameters that had their first gradient in the same step
    blocks: Sequence[Block]  # the blocks; all of one shape, type and device
    owner: int | None = None  # the rank that has its state, where state is sharded
    step: int = 0  # steps of the optimizer since the first gradient
    phases: tuple[int, int] = (0, 0)  # of the left and the right factor in a window of steps
    tensors: dict[str, Tensor] = field(default_factory=dict)  # stacked state by name
    jobs: dict[int, Job] = field(default_factory=dict)  # roots that wait to be used, by side
    shape: tuple[int, int] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        first = self.blocks[0].parameter
        self.shape, self.dtype = self.blocks[0].shape, widened(first.dtype)

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return local(self.blocks[0].parameter.detach()).device

    @property
    def costs(self) -> tuple[float, float]:
        """Operations for its left and right roots, but for a factor."""
        m, n = self.shape
        return len(self.blocks) * float(m) ** 3, len(self.blocks) * float(n) ** 3

    def gather(self, rows: Sequence[int], finite: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Return the stacked gradients of these blocks; do not write to them.

        Those that are not finite, by flags on the device, are zeros.
        """
        parts = []
        for row in rows:
            block = self.blocks[row]
            assert block.parameter.grad is not None
            part = block.of(local(block.parameter.grad))
            if block.parameter in finite:
                part = torch.where(finite[block.parameter], part, 0)
            parts.append(part)
        if len(parts) == 1:
            return parts[0].to(self.dtype).unsqueeze(0)
        stack = torch.empty(len(parts), *self.shape, dtype=self.dtype, device=self.device)
        for into, part in zip(stack, parts, strict=True):
            into.copy_(part)
        return stack


def cut(parameter: nn.Parameter, max_dim: int) -> list[Block]:
    """Return a parameter's blocks, of at most `max_dim` rows and columns, as equal as possible."""
    rows, columns = _as_matrix(local(parameter.detach())).shape
    pieces = [(r, c) for r in _pieces(rows, max_dim) for c in _pieces(columns, max_dim)]
    shard = _shard(parameter)
    return [Block(parameter, f"{shard}{number}", r, c) for number, (r, c) in enumerate(pieces)]


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
        device = local(blocks[0].parameter.detach()).device.type
        most = _MOST_ELEMENTS_ON_CPU if device == "cpu" else _MOST_ELEMENTS
        together = max(1, most // (m * n))
        for begin in range(0, len(blocks), together):
            some = blocks[begin : begin + together]
            units.append(Unit(first + len(units), group, cohort, blocks=some))
    return units


def _shard(parameter: nn.Parameter) -> str:
    """Return the index of this rank's shard, so that all ranks' state has its own names."""
    if not is_sharded(parameter):
        return ""
    sharded: Any = parameter  # a DTensor, which is not imported here
    indices = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return "".join(f"{at}-" for at, placement in indices if not placement.is_replicate())


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.flatten(1)


def _pieces(size: int, most: int) -> list[slice]:
    """Return as few slices of `size` indices as possible, with lengths that differ by at most 1."""
    count = -(-size // most)
    ends = [size * i // count for i in range(count + 1)] if count else []
    return [slice(a, b) for a, b in pairwise(ends)]
