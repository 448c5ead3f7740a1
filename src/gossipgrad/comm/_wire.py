"""The wire format: one header per message, followed by a payload of raw tensor bytes."""

import enum
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DTYPES", "FLOATING", "Header", "Kind", "Part", "WireError"]

_MAGIC = b"gossip"
_VERSION = 7
_FIXED = struct.Struct("!6sBBB16sIIIqIQ")

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.uint8)


class WireError(ValueError):
    """A message of another program or version; it is dropped and counted."""


class Kind(enum.IntEnum):
    """The kind of a message."""

    DATA = 1
    VOID = 2  # the sender has voided `round`, and sends no part of it
    FENCE = 3  # the sender is at `round` of this epoch, and sends no further part of earlier ones
    LEAVE = 4  # the sender leaves
    READY = 5  # the sender has posted `bucket` of `round`: the receiver may send its part
    WITHDRAW = 6  # the sender takes that back, and sends no part itself
    MAIL = 7  # version `round` of the tensor with key `bucket`, for the mailbox
    SILENT = 8  # the sender has waited in vain for rank `bucket`
    STATE = 9  # a piece of a replica of `round` bytes, for a joiner


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message; 57 bytes.

    Attributes:
        kind: The kind of the message.
        run: The run's 16 random bytes, made by rank 0 at the start.
        sender: The sending rank.
        generation: The sender's generation of the membership.
        epoch: How many collectives the sender has entered in that generation.
        round: The round of the exchange.
        bucket: Index of the bucket.
        dtype: Type of the elements, None when there is no payload.
        size_bytes: Bytes of the payload.
    """

    kind: Kind
    run: bytes
    sender: int
    generation: int = 0
    epoch: int = 0
    round: int = 0
    bucket: int = 0
    dtype: torch.dtype | None = None
    size_bytes: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes, big-endian."""
        dtype = 255 if self.dtype is None else DTYPES.index(self.dtype)
        return _FIXED.pack(
            *(_MAGIC, _VERSION, self.kind, dtype, self.run, self.sender),
            *(self.generation, self.epoch, self.round, self.bucket, self.size_bytes),
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Read a header and check every field.

        Raises:
            WireError: If the bytes are not a header of this version.
        """
        if len(data) != _FIXED.size:
            raise WireError(f"a header has {_FIXED.size} bytes, got {len(data)}")
        magic, version, kind, code, run, *numbers = _FIXED.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise WireError(f"not a gossipgrad message of wire version {_VERSION}")
        if kind not in Kind.__members__.values():
            raise WireError(f"unknown kind of message {kind}")
        if code != 255 and code >= len(DTYPES):
            raise WireError(f"unknown dtype code {code}")
        sender, generation, epoch, round, bucket, size_bytes = numbers
        dtype = None if code == 255 else DTYPES[code]
        return cls(Kind(kind), run, sender, generation, epoch, round, bucket, dtype, size_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """One bucket of the plan: element type and count."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the bucket on the wire."""
        return self.numel * self.dtype.itemsize

    def check(self, payload: Tensor, bucket: int) -> None:
        """Check a payload against the plan.

        Raises:
            ValueError: If the payload does not fit.
        """
        if payload.dtype != self.dtype or payload.numel() != self.numel:
            raise ValueError(
                f"bucket {bucket} is planned as {self.numel} x {self.dtype}, "
                f"got {payload.numel()} x {payload.dtype}"
            )

    def read(self, header: Header, payload: Tensor | None) -> Tensor:
        """Return the elements of a message.

        Raises:
            WireError: If they do not fit.
        """
        size_bytes = 0 if payload is None else payload.numel()
        announced = header.dtype, header.size_bytes
        if announced != (self.dtype, self.size_bytes) or size_bytes != self.size_bytes:
            raise WireError(
                f"bucket {header.bucket} is planned as {self.size_bytes} bytes of {self.dtype}, "
                f"got {size_bytes} bytes announced as {header.size_bytes} of {header.dtype}"
            )
        body = torch.empty(0, dtype=torch.uint8, device="cpu") if payload is None else payload
        return body.view(self.dtype)
