"""What stands on the wire: one header a message, and a payload of raw tensor bytes behind it."""

import enum
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DTYPES", "FLOATING", "Header", "Kind", "Part", "WireError"]

_MAGIC = b"gossip"
_VERSION = 5
_FIXED = struct.Struct("!6sBBB16sIIIqIQ")

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.uint8)


class WireError(ValueError):
    """A message that is not ours, or not of this version; it is dropped and counted."""


class Kind(enum.IntEnum):
    """What a message is for."""

    DATA = 1
    VOID = 2  # the sender has given up `round`, and sends no part of it
    FENCE = 3  # the sender is at `round` of this epoch: nothing more is sent of what was before
    LEAVE = 4  # the sender leaves
    PART = 5  # the sender has lost its link to the receiver, and receives nothing any more
    ASK = 6  # may the sender send its part of `round`?
    GO = 7  # it may
    MAIL = 8  # version `round` of the tensor with key `bucket`, for the mailbox


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a message that says what it is; 57 bytes.

    Attributes:
        kind: What the message is for.
        run: The run's 16 random bytes, made by rank 0 at the start.
        sender: The sending rank.
        generation: The membership that the sender lives in.
        epoch: How many collectives the sender has entered in that generation.
        round: The round of the exchange.
        bucket: Which part of the payload this is.
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
        """The header as bytes, big-endian."""
        dtype = 255 if self.dtype is None else DTYPES.index(self.dtype)
        return _FIXED.pack(
            *(_MAGIC, _VERSION, self.kind, dtype, self.run, self.sender),
            *(self.generation, self.epoch, self.round, self.bucket, self.size_bytes),
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Reads a header; every field is checked before it is believed.

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
    """What the plan says of one bucket: element type and count."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the bucket on the wire."""
        return self.numel * self.dtype.itemsize

    def check(self, payload: Tensor, bucket: int) -> None:
        """Refuses to send what the plan does not foresee.

        Raises:
            ValueError: If the payload does not fit.
        """
        if payload.dtype != self.dtype or payload.numel() != self.numel:
            raise ValueError(
                f"bucket {bucket} is planned as {self.numel} x {self.dtype}, "
                f"got {payload.numel()} x {payload.dtype}"
            )

    def read(self, header: Header, payload: Tensor | None) -> Tensor:
        """The elements that a message brings.

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
        body = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        return body.view(self.dtype)
