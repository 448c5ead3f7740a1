"""How the ranks of a ring shuffle find each other, and agree on which rows travel."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from gossipgrad.comm import Group, Transport
from gossipgrad.errors import AgreementError

from . import _shards
from ._shards import check_whole

TransportFactory = Callable[[Group], Transport]


def agree(group: Group, settings: dict[str, Any], num_rows: int) -> list[int]:
    """The sizes of all shards, if all ranks have the same settings; a collective.

    Raises:
        AgreementError: On every rank, with the first difference to rank 0.
        ValueError: On every rank, if a shard is too small.
    """
    told = group.all_gather_object({"settings": settings, "rows": num_rows})
    for rank, other in zip(group.members, told, strict=True):
        for name, value in told[0]["settings"].items():
            if other["settings"][name] != value:
                raise AgreementError(
                    f"rank {rank} has {name}={other['settings'][name]}, rank {group.members[0]} "
                    f"has {value}: rows travel from one to the other, so both need the same"
                )
    sizes = [other["rows"] for other in told]
    if len(sizes) > 1 and min(sizes) < 2:
        raise ValueError(
            f"rank {sizes.index(min(sizes))} has {min(sizes)} rows, but every rank needs two at "
            "least: one to train on while the other travels"
        )
    return sizes


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


def check_arguments(
    tensors: tuple[Tensor, ...],
    batch_size: int,
    seed: int,
    drop_last: bool,
    credits: int,
    deadline_seconds: float,
) -> None:
    """Refuses what this rank can know to be wrong.

    Raises:
        ValueError: For shards or settings that cannot be.
    """
    if not tensors:
        raise ValueError("no tensors: give inputs and targets, RingShuffle(x, y, batch_size=64)")
    lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(f"tensors have {lengths} rows, but need equally many, and at least one")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor lies on {tensor.device}: keep the shard in host memory, and move each "
                "batch to the device"
            )
    check_whole(1, batch_size=batch_size, credits=credits)
    check_whole(0, seed=seed)
    if not isinstance(deadline_seconds, Real) or not 0 <= float(deadline_seconds) < math.inf:
        raise ValueError(
            f"deadline_seconds is {deadline_seconds!r}, but must be a number of seconds, at least "
            "0 and finite; 0: no batch waits for a late neighbour."
        )
    if not num_batches(lengths[0], batch_size, drop_last=drop_last):
        raise ValueError(
            f"{lengths[0]} rows make no batch of {batch_size} with drop_last: use smaller batches"
        )
