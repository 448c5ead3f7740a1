"""The rows of a shard: which lie in it, which have no slot yet, and how many travel in a step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from . import _shards

Packed = UInt8[Tensor, "_ _"]  # rows, each of so many bytes


@dataclass(slots=True, eq=False)
class Parcel:
    """Rows that came together and have no slot yet, all of them or some."""

    rows: Packed
    sender: int | None = None  # who keeps a copy until it hears that they have slots; None: nobody
    number: int = 0  # of the parcel, among those of the sender


class Rows:
    """A shard of `n` slots. The j-th row that comes takes the slot of the j-th row that went."""

    # `held`: whether the row in a slot is this rank's; one that has gone leaves its copy there.
    # `vacant`: slots whose rows have gone, in the order in which they are filled. `spare`: slots
    # that no row is due for, as the rank it would have come from is gone.

    def __init__(self, tensors: Sequence[Shaped[Tensor, "row ..."]]) -> None:
        self._parts = [(t.dtype, t.shape[1:], t.shape[1:].numel()) for t in tensors]
        self.row_bytes = sum(dtype.itemsize * numel for dtype, _, numel in self._parts)
        self.packed = self.pack(tensors)
        self.held: Bool[np.ndarray, " slot"] = np.ones(len(self.packed), dtype=bool)
        self.vacant: deque[int] = deque()
        self.spare: deque[int] = deque()
        self.waiting: deque[Parcel] = deque()

    @property
    def slots(self) -> int:
        """Slots that hold a row or await one."""
        return len(self.held) - len(self.spare)

    @property
    def waiting_count(self) -> int:
        """Rows of this rank that have no slot yet."""
        return sum(len(parcel.rows) for parcel in self.waiting)

    def pack(self, tensors: Sequence[Shaped[Tensor, "row ..."]]) -> Packed:
        """Rows as bytes, in memory of their own."""
        packed = torch.empty(len(tensors[0]), self.row_bytes, dtype=torch.uint8)
        for part, tensor, (_, _, numel) in zip(
            self._split(packed), tensors, self._parts, strict=True
        ):
            if numel:
                flat = tensor.detach().reshape(len(packed), numel).contiguous()
                part.copy_(flat.view(torch.uint8))
        return packed

    def unpack(self, packed: Packed) -> tuple[Shaped[Tensor, "row ..."], ...]:
        """Copies of packed rows as tensors."""
        count = len(packed)
        return tuple(
            part.clone(memory_format=torch.contiguous_format).view(dtype).view(count, *shape)
            if numel
            else torch.empty(count, *shape, dtype=dtype)
            for part, (dtype, shape, numel) in zip(self._split(packed), self._parts, strict=True)
        )

    def read(self, slots: Int[np.ndarray, " row"]) -> Packed:
        """Copies of the rows in some slots."""
        return self.packed.index_select(0, torch.from_numpy(slots))

    def take_out(self, slots: Int[np.ndarray, " row"]) -> Packed:
        """The rows in some slots, which must be held; the slots are vacant from now on."""
        assert self.held[slots].all(), "a row is given away twice"
        self.held[slots] = False
        self.vacant.extend(slots.tolist())
        return self.read(slots)

    def fill_slots(self) -> list[Parcel]:
        """Fill slots for as long as there are both rows and slots."""
        filled = []
        while self.waiting and (free := self.vacant or self.spare):
            parcel = self.waiting[0]
            index = [free.popleft() for _ in range(min(len(parcel.rows), len(free)))]
            self.packed[index] = parcel.rows[: len(index)]
            self.held[index] = True
            parcel.rows = parcel.rows[len(index) :]
            if not len(parcel.rows):
                filled.append(self.waiting.popleft())
        return filled

    def write_off(self) -> None:
        """Awaits nothing for the vacant slots any more: the shard is smaller from now on."""
        self.spare.extend(self.vacant)
        self.vacant.clear()

    def content(self) -> Packed:
        """Copies of all rows that are this rank's: those in slots, then those without."""
        waiting = (parcel.rows for parcel in self.waiting)
        return torch.cat([self.read(np.flatnonzero(self.held)), *waiting])

    def _split(self, packed: Packed) -> tuple[Packed, ...]:
        return packed.split([dtype.itemsize * numel for dtype, _, numel in self._parts], dim=1)


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
