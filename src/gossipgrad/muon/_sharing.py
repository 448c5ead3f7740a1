"""Updates shared out among ranks: each matrix is polarised by one of them.

Scenario of one step, in chunks of each rank's own matrices:

1. If a rank has only rows of a matrix (FSDP2), all send the rows of all chunks to their owners.
2. A rank polarises a chunk, while later chunks and the factors of others are under way.
3. It sends the factors of the chunk, whole or by rows, and takes the next one.
4. When all its chunks are sent, it waits for the factors of the others.

All ranks make the same plan from shapes alone, so their collectives have one order.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from gossipgrad.muon._layouts import Layout, sides_of
from gossipgrad.optim import distribute

__all__ = ["update_shared"]

_CHUNK_BYTES = 16 << 20  # of factors, at least: a smaller message costs more than its bytes

Owned = Sequence[Sequence[int]]
"""Indices of matrices by the rank that polarises them."""


class _Copies:
    """Every rank has all matrices, and gets all factors."""

    def __init__(self, group: dist.ProcessGroup, sources: Sequence[Tensor], dtype: torch.dtype):
        self._group, self._sources, self._dtype = group, sources, dtype
        self._leaving: list[tuple[Sequence[int], Tensor, dist.Work | None]] = []

    def collect(self, owned: Owned) -> None:
        """Start to bring the matrices of a chunk to their owners."""

    def wholes(self, owned: Owned) -> list[Tensor]:
        """Return this rank's matrices of the next chunk that was collected."""
        return [self._sources[i] for i in owned[self._group.rank()]]

    def spread(self, owned: Owned, factors: Sequence[Tensor]) -> None:
        """Start to send a chunk's factors to all ranks."""
        for owner, indices in enumerate(owned):
            sizes = sum(self._sources[i].numel() for i in indices)
            flat = self._sources[0].new_empty(sizes, dtype=self._dtype)
            if owner == self._group.rank() and indices:
                torch.cat([factor.reshape(-1) for factor in factors], out=flat)
            if indices:
                work = dist.broadcast(flat, group=self._group, group_src=owner, async_op=True)
                self._leaving.append((indices, flat, work))

    def parts(self) -> dict[int, Tensor]:
        """Wait for all factors; return this rank's parts of them."""
        found: dict[int, Tensor] = {}
        for indices, flat, work in self._leaving:
            if work is not None:
                work.wait()
            pieces = flat.split([self._sources[i].numel() for i in indices])
            found |= {
                i: piece.view(self._sources[i].shape)
                for i, piece in zip(indices, pieces, strict=True)
            }
        return found


class _Rows(_Copies):
    """A rank has and gets its rows of every matrix, in chunks as `Shard(0)` has them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sources: Sequence[Tensor],
        dtype: torch.dtype,
        shapes: Sequence[torch.Size],
    ):
        super().__init__(group, sources, dtype)
        self._shapes = shapes
        self._arriving: list[tuple[Tensor, list[int], dist.Work | None]] = []

    def collect(self, owned: Owned) -> None:
        """See `_Copies`."""
        rank = self._group.rank()
        pieces = [self._sources[i].reshape(-1) for indices in owned for i in indices]
        sent = [self._numel(indices, rank) for indices in owned]
        received = [self._numel(owned[rank], each) for each in range(len(owned))]
        self._arriving.append(self._exchange(pieces, sent, received, self._sources[0].dtype))

    def wholes(self, owned: Owned) -> list[Tensor]:
        """See `_Copies`."""
        flat, counts, work = self._arriving.pop(0)
        if work is not None:
            work.wait()
        own = owned[self._group.rank()]
        of_ranks = [
            part.split([self._numel([i], rank) for i in own])
            for rank, part in enumerate(flat.split(counts))
        ]
        return [
            torch.cat([of_rank[index] for of_rank in of_ranks]).view(self._shapes[i])
            for index, i in enumerate(own)
        ]

    def spread(self, owned: Owned, factors: Sequence[Tensor]) -> None:
        """See `_Copies`."""
        rank, size = self._group.rank(), len(owned)
        rows = [
            factor.split([_rows(len(factor), size, r) for r in range(size)]) for factor in factors
        ]
        pieces = [each[r].reshape(-1) for r in range(size) for each in rows]
        sent = [self._numel(owned[rank], each) for each in range(size)]
        received = [self._numel(indices, rank) for indices in owned]
        flat, _, work = self._exchange(pieces, sent, received, self._dtype)
        self._leaving.append(([i for indices in owned for i in indices], flat, work))

    def _exchange(
        self, pieces: Sequence[Tensor], sent: list[int], received: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, list[int], dist.Work | None]:
        like = self._sources[0]
        into = like.new_empty(sum(received), dtype=dtype)
        flat = torch.cat([*pieces, like.new_empty(0, dtype=dtype)])
        work = dist.all_to_all_single(into, flat, received, sent, group=self._group, async_op=True)
        return into, received, work

    def _numel(self, indices: Sequence[int], rank: int) -> int:
        shapes = [self._shapes[i] for i in indices]
        return sum(
            _rows(shape[0], self._group.size(), rank) * shape[1:].numel() for shape in shapes
        )


@torch.no_grad()
def update_shared(
    sources: Sequence[Tensor],
    layouts: Sequence[Layout],
    update_of: Callable[[Sequence[Tensor], Sequence[Layout]], list[Tensor]],
    kind: torch.dtype,
    group: dist.ProcessGroup,
    *,
    shapes: Sequence[torch.Size] | None = None,
) -> list[Tensor]:
    """Return this rank's part of the update of each parameter; a collective of the group.

    `sources` are the same on all ranks, or this rank's rows of parameters of `shapes`. `update_of`
    polarises whole ones, given with their layouts, and returns `kind`. The bits are those of one
    rank alone.
    """
    ways = _Copies(group, sources, kind) if shapes is None else _Rows(group, sources, kind, shapes)
    shapes = [source.shape for source in sources] if shapes is None else shapes
    plan = _plan(shapes, layouts, kind, group.size())
    for owned in plan:
        ways.collect(owned)
    for owned in plan:
        own = [layouts[i] for i in owned[group.rank()]]
        ways.spread(owned, update_of(ways.wholes(owned), own))
    parts = ways.parts()
    return [parts[i] for i in range(len(sources))]


def _plan(
    shapes: Sequence[torch.Size], layouts: Sequence[Layout], kind: torch.dtype, size: int
) -> list[Owned]:
    """Return the chunks, in each those of all ranks."""
    squares = 6 if kind.itemsize >= 4 else 0.5  # products of m x m for one of m x n
    costs = [
        sum(
            count * min(sides) ** 2 * (max(sides) + squares * min(sides))
            for count, *sides in stacks
        )
        for stacks in map(sides_of, shapes, layouts)
    ]
    owners = distribute(costs, [0.0] * size)
    chunks: list[list[list[int]]] = [[] for _ in range(size)]
    filled = [_CHUNK_BYTES] * size
    for index in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owner = owners[index]
        if filled[owner] >= _CHUNK_BYTES:
            chunks[owner].append([])
            filled[owner] = 0
        chunks[owner][-1].append(index)
        filled[owner] += shapes[index].numel() * kind.itemsize
    return [list(owned) for owned in zip_longest(*chunks, fillvalue=[])]


def _rows(total: int, size: int, rank: int) -> int:
    """Return how many rows `Shard(0)` gives to a rank."""
    most = -(-total // size)
    return max(0, min(total - rank * most, most))
