"""Settings of rounds, which all ranks of a session share."""

import math
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import Any

import torch

from gossipgrad.comm import MOST_BYTES, BucketPlan
from gossipgrad.engine._modes import Mode, Stale
from gossipgrad.topology import Schedule

__all__ = ["RoundSettings", "check_numbers", "is_count", "resolve_average_every"]


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The schedule of rounds, and how tensors are sent; a family adds its own settings.

    Attributes:
        schedule: The partners of each round while all ranks live.
        mode: When a snapshot is sent and mixed.
        every: Steps in a round.
        average_every: Steps between exact averages over all ranks; None for never.
        wire_dtype: Type of tensors on the wire; None for their own type.
        bucket_bytes: Size of a message.
        exchanges: Rounds at the end of a step, each with another partner; for flows after the
            update.
        island: Ranks of a replica that exchange a slice of it.
    """

    schedule: Schedule
    mode: Mode
    every: int
    average_every: int | None
    wire_dtype: torch.dtype | None
    bucket_bytes: int
    exchanges: int = 1
    island: int = 1

    @property
    def snapshots(self) -> int:
        """The largest number of snapshots; by default one in flight and one being filled."""
        return self.mode.snapshots if isinstance(self.mode, Stale) else 2

    @property
    def window(self) -> int:
        """Rounds that may be open on one link."""
        return self.mode.snapshots if isinstance(self.mode, Stale) else 1

    def describe(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"topology": named.pop("schedule").describe(), **named}

    def must_fit(self) -> dict[str, str]:
        """Return the settings that must match when a state is loaded; waits may differ."""
        described = self.describe()
        kept = [f"{k} {v}" for k, v in asdict(self.mode).items() if k != "patience_seconds"]
        described["mode"] = ", ".join([type(self.mode).__name__.lower(), *kept])
        return {name: str(value) for name, value in described.items()}


def is_count(value: object) -> bool:
    """Whether it is an integer of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def resolve_average_every(average_every: object, world_size: int) -> int | None:
    """Return the steps between exact averages, None for never.

    Raises:
        ValueError: If it is not a valid number.
    """
    if average_every == "log_p":
        return max(1, math.ceil(math.log2(world_size)))
    if average_every is None:
        return None
    if isinstance(average_every, Integral) and is_count(average_every):
        return int(average_every)
    raise ValueError(
        f"average_every must be a positive number of steps, 'log_p' or None, got {average_every!r}"
    )


def check_numbers(*, every: object, bucket_bytes: object, wire_dtype: object) -> None:
    """Raise `ValueError` for invalid numbers, sizes or types."""
    if not is_count(every):
        raise ValueError(
            f"every counts steps in a round, so it is at least 1, got {every!r}: give a whole "
            "number, such as every=2"
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, Integral):
        raise ValueError(
            f"bucket_bytes is the size of a message, a whole number such as 2**20, got "
            f"{bucket_bytes!r}"
        )
    if int(bucket_bytes) > MOST_BYTES:
        raise ValueError(
            f"bucket_bytes is {bucket_bytes}, and a message has at most {MOST_BYTES}: give less, "
            "or None"
        )
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise ValueError(
            f"wire_dtype must be a type such as torch.bfloat16, or None, got {wire_dtype!r}"
        )
    BucketPlan.make([], bucket_bytes=int(bucket_bytes), wire_dtype=wire_dtype)
