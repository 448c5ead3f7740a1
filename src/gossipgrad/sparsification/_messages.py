"""Sparse messages of one group: what a rank sends, and the sums that it gets."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from gossipgrad.comm import Group
from gossipgrad.compression import SparseFormat, narrowed, top_k
from gossipgrad.errors import GossipError
from gossipgrad.sparsification._streams import Staging

__all__ = ["Coordinates", "Gather", "Split", "unequal_steps"]

_STEP_BYTES = 16  # at the end of every message
_ALIGNMENT_BYTES = 8
_DEVIATIONS = 3  # by which a part may be larger than on average
_ODD = 0x9E3779B1  # of the golden ratio: its multiples are spread evenly

Step = tuple[int, int]
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of values on the wire, and of what is selected from and summed."""


class Coordinates(NamedTuple):
    """Some coordinates of a group, and their values."""

    indices: Int[Tensor, " count"]
    values: Float[Tensor, " count"]


class Gather:
    """Each rank's selection goes to all ranks, in one all-gather."""

    def __init__(
        self, numel: int, count: int, world_size: int, dtypes: Dtypes, device: torch.device
    ) -> None:
        self._world_size, self._device = world_size, device
        self._value_dtype, self._dtype = dtypes
        self._format = SparseFormat(numel, count, self._value_dtype)
        size = self._format.size_bytes + _STEP_BYTES
        self._message = torch.zeros(size, dtype=torch.uint8, device=device)
        self._gathered = torch.empty(size * world_size, dtype=torch.uint8, device=device)
        self.bytes_sent = (world_size - 1) * size
        self.memory_bytes = (world_size + 1) * size

    def pack(
        self, indices: Int[Tensor, " count"], values: Float[Tensor, " count"], step: Step
    ) -> tuple[Coordinates, Tensor]:
        """Write the message; return what is sent of a selection, and with which values."""
        _write_steps(self._message.unsqueeze(0), step)
        sent = self._format.pack(indices, values, self._message[:-_STEP_BYTES])
        return Coordinates(indices, values), sent

    def pack_nothing(self, step: Step) -> None:
        """Write a message of zeros."""
        indices = torch.arange(self._format.count, device=self._device)
        self.pack(indices, torch.zeros_like(indices, dtype=self._dtype), step)

    def exchange(self, group: Group, staging: Staging) -> list[Coordinates]:
        """Send the message; return what to add up, in this order on all ranks."""
        messages = _gathered(group, staging, self._message, self._gathered)
        _same_step(messages)
        found = [Coordinates(*self._format.unpack(each[:-_STEP_BYTES])) for each in messages]
        if self._device.type != "cpu":  # which would add those of one call in any order
            return found
        indices, values = zip(*found, strict=True)
        return [Coordinates(torch.cat(indices), torch.cat(values))]


class Split:
    """Split and reduce: bytes do not grow with the number of ranks.

    1. Each rank selects `count` coordinates, and sends each to its owner.
    2. An owner adds up what it gets, and selects the `count / world_size` largest sums.
    3. Its selection goes to all ranks.

    So every rank sends about twice `count` coordinates; an all-gather sends `world_size - 1` times
    `count`. What is not in the second selection stays in the residuals of those who sent it.

    Coordinates are in rows of `world_size`; every rank owns one of each row, and which one is
    turned by a hash of the row, so that no owner has a whole column of a matrix. A part has room
    for a few more coordinates than on average; what finds no room stays in the residual, and empty
    slots are zeros at row 0.
    """

    rounding: Coordinates | None = None  # what the wire has rounded away of this rank's sums

    def __init__(
        self, numel: int, count: int, world_size: int, dtypes: Dtypes, device: torch.device
    ) -> None:
        self._world_size = world_size
        self._value_dtype, self._dtype = dtypes
        self._rows = -(-numel // world_size)  # the last one may be short
        average = count / world_size
        self._room = min(self._rows, math.ceil(average + _DEVIATIONS * math.sqrt(average)))
        self._selected = min(self._rows, max(1, count // world_size))
        sizes = [
            _aligned(room * self._value_dtype.itemsize) + _aligned(4 * room) + _STEP_BYTES
            for room in (self._room, self._selected)
        ]
        self._parts, self._gathered = (
            torch.zeros(world_size, size, dtype=torch.uint8, device=device) for size in sizes
        )
        self._received = torch.empty_like(self._parts)
        self._message = torch.zeros(1, sizes[1], dtype=torch.uint8, device=device)
        self.bytes_sent = (world_size - 1) * sum(sizes)
        self.memory_bytes = 2 * world_size * sizes[0] + (world_size + 1) * sizes[1]

    def pack(
        self, indices: Int[Tensor, " count"], values: Float[Tensor, " count"], step: Step
    ) -> tuple[Coordinates, Tensor]:
        """Write the parts; return what is sent of a selection, and with which values."""
        self.pack_nothing(step)
        sent = narrowed(values, self._value_dtype)
        rows = indices // self._world_size
        by_owner = ((indices + _turn(rows)) % self._world_size).to(torch.int16).sort(stable=True)
        owners = by_owner.values.to(torch.int64)
        sizes = torch.bincount(owners, minlength=self._world_size)
        slots = torch.arange(len(owners), device=owners.device) - (sizes.cumsum(0) - sizes)[owners]
        fits = slots < self._room
        part_values, part_rows = self._views(self._parts)
        order, to = by_owner.indices[fits], (owners[fits], slots[fits])
        part_values[to] = sent[order]
        part_rows[to] = rows[order].to(torch.int32)
        has_slot = torch.zeros_like(fits).index_fill_(0, order, True)
        return Coordinates(indices[has_slot], values[has_slot]), sent[has_slot]

    def pack_nothing(self, step: Step) -> None:
        """Write parts of zeros."""
        self._parts.zero_()
        _write_steps(self._parts, step)

    def exchange(self, group: Group, staging: Staging) -> list[Coordinates]:
        """Send the parts and the sums; return what to add up, in this order on all ranks."""
        host = staging.to_host(self._parts)
        received = self._received if host is self._parts else torch.empty_like(host)
        group.all_to_all_into_(received, host)
        parts = staging.from_host(received, self._received)
        step = _same_step(parts)
        total = torch.zeros(self._rows, dtype=self._dtype, device=parts.device)
        values, rows = self._views(parts)
        total.index_add_(0, rows.flatten(), values.flatten().to(self._dtype))
        chosen = top_k(total, self._selected, method="threshold")  # most are 0
        sums = total[chosen]
        sent, sent_rows = self._views(self._message)
        sent[0], sent_rows[0] = narrowed(sums, self._value_dtype), chosen.to(torch.int32)
        _write_steps(self._message, step)
        if self._value_dtype.itemsize < self._dtype.itemsize:
            lost = torch.where(sent[0] == 0, 0, sums - sent[0])  # 0 counts as left out
            self.rounding = Coordinates(self._coordinates(group.rank, chosen), lost)
        messages = _gathered(group, staging, self._message, self._gathered)
        _same_step(messages)
        values, rows = self._views(messages)
        owners = torch.arange(self._world_size, device=rows.device).unsqueeze(1)
        return [Coordinates(self._coordinates(owners, rows.long()).flatten(), values.flatten())]

    def _coordinates(self, owner: int | Tensor, rows: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return an owner's coordinates in these rows; a short row lacks some."""
        return rows * self._world_size + (owner - _turn(rows)) % self._world_size

    def _views(self, parts: UInt8[Tensor, "ranks size"]) -> tuple[Tensor, Tensor]:
        """Return the values and rows in parts for owners, or in selections of owners."""
        is_part = parts.shape[1] == self._parts.shape[1]
        room = self._room if is_part else self._selected
        values = parts[:, : room * self._value_dtype.itemsize].view(self._value_dtype)
        start = _aligned(room * self._value_dtype.itemsize)
        return values, parts[:, start : start + 4 * room].view(torch.int32)


def _same_step(messages: UInt8[Tensor, "world size"]) -> Step:
    """Return the step of all messages; raise `GossipError` if they are of several."""
    steps = messages[:, -_STEP_BYTES:].view(torch.int64).tolist()
    if any(step != steps[0] for step in steps):
        raise GossipError(unequal_steps(f" (steps so far, by rank: {[step[0] for step in steps]})"))
    return steps[0][0], steps[0][1]


def unequal_steps(of_ranks: str = "") -> str:
    """Return the message of a round of ranks in different steps."""
    return (
        f"the ranks are in different steps in one round{of_ranks}, or evaluate a closure at "
        "different weights: replicas would drift apart. Make the same passes and steps on every "
        "rank, and average the loss that a closure returns over ranks"
    )


def _gathered(
    group: Group, staging: Staging, message: UInt8[Tensor, "..."], out: UInt8[Tensor, "..."]
) -> UInt8[Tensor, "world n"]:
    """Return the messages of all ranks, where the group's gradients are."""
    host = staging.to_host(message)
    received = out if host is message else torch.empty_like(out, device="cpu")
    group.all_gather_into_(received.view(-1), host.view(-1))
    return staging.from_host(received, out).view(-1, message.numel())


def _write_steps(messages: UInt8[Tensor, "world size"], step: Step) -> None:
    messages[:, -_STEP_BYTES:].view(torch.int64)[:] = torch.tensor(step, device=messages.device)


def _turn(rows: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    return ((rows * _ODD) & 0xFFFFFFFF) >> 8


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
