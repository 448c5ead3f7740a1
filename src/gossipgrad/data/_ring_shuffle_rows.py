"""The rows of a shard: which lie in it, which are on their way, how they travel, and how many."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from . import _shards

_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a row is: the dtype and shape of its part in each tensor of the shard."""

    parts: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowFormat":
        """The format of the rows of `tensors`."""
        return cls(tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(dtype.itemsize * _numel(shape) for dtype, shape in self.parts)

    def size_bytes(self, count: int) -> int:
        """Bytes of `count` rows on the wire: one block a tensor, each aligned."""
        return sum(self._blocks(count))

    def pack(self, rows: Sequence[Shaped[Tensor, "row ..."]]) -> UInt8[Tensor, " byte"]:
        """Rows as bytes, in memory of their own."""
        count = len(rows[0])
        payload = torch.empty(self.size_bytes(count), dtype=torch.uint8)
        for view, part in zip(self.views(payload, count), rows, strict=True):
            view.copy_(part)
        return payload

    def views(self, payload: UInt8[Tensor, " byte"], count: int) -> list[Shaped[Tensor, "row ..."]]:
        """The `count` rows in `payload`, in its memory."""
        views, offset = [], 0
        for (dtype, shape), block in zip(self.parts, self._blocks(count), strict=True):
            size = count * dtype.itemsize * _numel(shape)
            views.append(payload[offset : offset + size].view(dtype).view(count, *shape))
            offset += block
        return views

    def _blocks(self, count: int) -> list[int]:
        sizes = [count * dtype.itemsize * _numel(shape) for dtype, shape in self.parts]
        return [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]


@dataclass(slots=True, eq=False)
class Parcel:
    """Rows that travel together.

    Attributes:
        payload: The rows as bytes.
        count: How many rows there are.
        placed: How many of them have a slot already.
    """

    payload: UInt8[Tensor, " byte"]
    count: int
    placed: int = 0

    @property
    def left(self) -> int:
        """Rows without a slot."""
        return self.count - self.placed


class Rows:
    """A shard of `n` slots. The j-th row that comes takes the slot of the j-th row that went.

    Args:
        tensors: Equally long tensors; copied.

    Attributes:
        tensors: One row a slot. A slot whose row has gone still has its copy, until it is filled.
        held: Whether the row in a slot is this rank's.
        vacant: Slots whose rows have gone, in the order in which they are filled.
        spare: Slots that no row is due for: the rank it would have come from is gone.
        unplaced: Rows of this rank that have no slot yet.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(
            tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors
        )
        self.format = RowFormat.of(self.tensors)
        self.held: Bool[np.ndarray, " slot"] = np.ones(len(self.tensors[0]), dtype=bool)
        self.vacant: deque[int] = deque()
        self.spare: deque[int] = deque()
        self.unplaced: deque[Parcel] = deque()

    @property
    def slots(self) -> int:
        """Slots that hold a row or await one."""
        return len(self.held) - len(self.spare)

    @property
    def unplaced_count(self) -> int:
        """Rows of this rank that have no slot yet."""
        return sum(parcel.left for parcel in self.unplaced)

    def read(self, slots: Int[np.ndarray, " row"]) -> tuple[Shaped[Tensor, "row ..."], ...]:
        """Copies of the rows in some slots."""
        index = torch.from_numpy(slots)
        return tuple(tensor.index_select(0, index) for tensor in self.tensors)

    def take_out(
        self, slots: Int[np.ndarray, " row"], rows: Sequence[Shaped[Tensor, "row ..."]]
    ) -> Parcel:
        """The rows in some slots as a parcel; others take their place, now or when they come.

        Args:
            slots: Slots that are held.
            rows: What `read` gave for them.
        """
        assert self.held[slots].all(), "a row is given away twice"
        self.held[slots] = False
        self.vacant.extend(slots.tolist())
        parcel = Parcel(self.format.pack(rows), len(slots))
        self.place()
        return parcel

    def put_in(self, parcel: Parcel, *, first: bool = False) -> None:
        """Takes rows in, into vacant slots as far as there are any."""
        if first:
            self.unplaced.appendleft(parcel)
        else:
            self.unplaced.append(parcel)
        self.place()

    def place(self) -> None:
        """Fills slots for as long as there are both rows and slots."""
        while self.unplaced and (free := self.vacant or self.spare):
            parcel = self.unplaced[0]
            count = min(parcel.left, len(free))
            index = [free.popleft() for _ in range(count)]
            rows = self.format.views(parcel.payload, parcel.count)
            for tensor, part in zip(self.tensors, rows, strict=True):
                tensor[index] = part[parcel.placed : parcel.placed + count]
            self.held[index] = True
            parcel.placed += count
            if parcel.left == 0:
                self.unplaced.popleft()

    def next_unplaced(self) -> Parcel:
        """Takes the first rows without a slot out again, for someone else."""
        parcel = self.unplaced.popleft()
        if parcel.placed == 0:
            return parcel
        views = self.format.views(parcel.payload, parcel.count)
        return Parcel(self.format.pack([view[parcel.placed :] for view in views]), parcel.left)

    def write_off(self) -> None:
        """Awaits nothing for the vacant slots any more: the shard is smaller from now on."""
        self.spare.extend(self.vacant)
        self.vacant.clear()

    def content(self) -> tuple[Shaped[Tensor, "row ..."], ...]:
        """Copies of all rows that are this rank's: those in slots, then those without."""
        parts = [self.read(np.flatnonzero(self.held))]
        for parcel in self.unplaced:
            views = self.format.views(parcel.payload, parcel.count)
            parts.append(tuple(view[parcel.placed :] for view in views))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class Flow:
    """How many rows travel in which step: the same number on every link.

    The whole batch where all batches are equal. Else the first rows of it, as many as in the
    smallest batch of any rank in that step; one row of a shard always stays.

    Args:
        sizes: Rows of all shards.
        batch_size: Rows of a batch, but the last of an epoch: one more or fewer.
        drop_last: Whether a smaller last batch is left out.

    Example:
        >>> flow = Flow([10, 7], batch_size=4, drop_last=False)
        >>> [flow.rows(step) for step in range(6)]
        [4, 3, 2, 3, 4, 2]
    """

    def __init__(self, sizes: Sequence[int], *, batch_size: int, drop_last: bool) -> None:
        self._shards = [
            (size, num_batches(size, batch_size, drop_last=drop_last)) for size in sorted({*sizes})
        ]
        self._batch_size = batch_size
        self.most_rows = max(1, min(batch_size, min(sizes) - 1))

    def rows(self, step: int) -> int:
        """Rows that travel in the batch that is number `step` since the start, counted from 0."""
        return min(
            min(self._batch_size, size - step % batches * self._batch_size, size - 1)
            for size, batches in self._shards
        )


def num_batches(num_rows: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches an epoch; see `_shards.num_batches`."""
    if drop_last:
        return num_rows // batch_size
    return _shards.num_batches(num_rows, batch_size)


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
