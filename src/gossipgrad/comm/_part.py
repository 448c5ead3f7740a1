"""What a plan says of one bucket, and whether a message fits it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm._transport import Arrival
from gossipgrad.comm._wire import Header, Kind, WireError

__all__ = ["Part", "check_planned", "check_run", "read", "values_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """What the plan says of one bucket: element type and count."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the bucket on the wire."""
        return self.numel * self.dtype.itemsize


def check_planned(bucket: int, payload: Tensor, plan: Sequence[Part]) -> None:
    """Refuses to send what the plan does not foresee.

    Raises:
        ValueError: If the payload does not fit.
    """
    part = plan[bucket]
    if payload.dtype != part.dtype or payload.numel() != part.numel:
        raise ValueError(
            f"bucket {bucket} is planned as {part.numel} x {part.dtype}, "
            f"got {payload.numel()} x {payload.dtype}"
        )


def check_run(run: bytes, credits: int) -> None:
    """Refuses a run or credits that no channel can have.

    Raises:
        ValueError: If they are such.
    """
    if len(run) != 16:
        raise ValueError(f"run must be 16 bytes, got {len(run)}: use secrets.token_bytes(16)")
    if credits < 1:
        raise ValueError(f"credits must be at least 1, got {credits}")


def read(
    arrival: Arrival,
    plan: Sequence[Part],
    *,
    run: bytes,
    rank: int,
    may_send: Callable[[int, int], bool],
) -> Header:
    """The header of a message, if it is one of this run, to this rank, that fits the plan.

    Whether a rank may send one of a generation is asked of `may_send`.

    Raises:
        WireError: If it is not.
    """
    header = Header.unpack(arrival.header)
    if header.run != run:
        raise WireError("it belongs to another run")
    if header.sender == rank or not may_send(header.sender, header.generation):
        raise WireError(f"rank {header.sender} is no peer of this run")
    _check_fits(header, arrival.payload, plan)
    return header


def values_of(header: Header, payload: Tensor | None, plan: Sequence[Part]) -> Tensor:
    """The elements that a message brings."""
    body = torch.empty(0, dtype=torch.uint8) if payload is None else payload
    return body.view(plan[header.bucket].dtype)


def _check_fits(header: Header, payload: Tensor | None, plan: Sequence[Part]) -> None:
    if header.kind is Kind.MAIL:
        return  # the mailbox has a plan of its own
    if header.kind is not Kind.DATA:
        if payload is not None:
            raise WireError(f"a {header.kind.name} message carries no payload")
        return
    if header.round < 0 or header.bucket >= len(plan):
        raise WireError(f"round {header.round}, bucket {header.bucket} is not in the plan")
    part = plan[header.bucket]
    size = 0 if payload is None else payload.numel()
    if (header.dtype, header.size_bytes, size) != (part.dtype, part.size_bytes, part.size_bytes):
        raise WireError(
            f"bucket {header.bucket} is planned as {part.size_bytes} bytes of {part.dtype}, "
            f"got {size} bytes announced as {header.size_bytes} of {header.dtype}"
        )
