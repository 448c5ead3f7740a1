"""What stands on the wire: one header a message, and a payload of raw tensor bytes behind it."""

import enum
import struct
from dataclasses import dataclass

import torch

__all__ = ["DTYPES", "FLOATING", "MAX_VOIDED", "Header", "Kind", "WireError"]

_MAGIC = b"gossip"
_VERSION = 3
_FIXED = struct.Struct("!6sBBB16sIIqqIIQH")
_ROUND = struct.Struct("!q")
MAX_VOIDED = 1024

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.uint8)


class WireError(ValueError):
    """A message that is not ours, or not of this version; it is dropped and counted."""


class Kind(enum.IntEnum):
    """What a message is for."""

    DATA = 1
    NOTE = 2  # a header alone, to name voided rounds when no data follows
    SETTLE = 3  # nothing past `round` comes from the sender before its collective `epoch` is over
    LEAVE = 4  # nothing past `round` comes from the sender any more
    GO_ON = 6  # takes SETTLE back: the collective has failed
    PART = 7  # the sender has lost its link to the receiver, and takes nothing in any more
    ENTER = 5  # the sender lives in `generation`, and sends nothing of it before `round`
    ASK = 8  # may the sender send its part of `round`?
    GO = 9  # it may


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a message that says what it is; 67 bytes and 8 for each voided round.

    Attributes:
        kind: What the message is for.
        run: The run's 16 random bytes, made by rank 0 at the start.
        sender: The sending rank.
        generation: The membership the sender lives in.
        round: The round of the exchange; for `SETTLE` and `LEAVE` the last round that was sent.
        epoch: How often the sender has come to a collective in its generation.
        known: The receiver's last `SETTLE` of that generation that the sender had heard of.
        bucket: Which part of the payload this is.
        dtype: Type of the elements, None when there is no payload.
        size_bytes: Bytes of the payload.
        voided: Rounds that the sender gave up before sending its part, on this link.
    """

    kind: Kind
    run: bytes
    sender: int
    generation: int = 0
    round: int = -1
    epoch: int = 0
    known: int = 0
    bucket: int = 0
    dtype: torch.dtype | None = None
    size_bytes: int = 0
    voided: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The header as bytes, big-endian."""
        dtype = 255 if self.dtype is None else DTYPES.index(self.dtype)
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            dtype,
            self.run,
            self.sender,
            self.generation,
            self.round,
            self.epoch,
            self.known,
            self.bucket,
            self.size_bytes,
            len(self.voided),
        )
        return fixed + b"".join(map(_ROUND.pack, self.voided))

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Reads a header; every field is checked before it is believed.

        Raises:
            WireError: If the bytes are not a header of this version.
        """
        if len(data) < _FIXED.size:
            raise WireError(f"a header has at least {_FIXED.size} bytes, got {len(data)}")
        magic, version, kind, dtype, run, *numbers = _FIXED.unpack_from(data)
        sender, generation, round, epoch, known, bucket, size, count = numbers
        if magic != _MAGIC or version != _VERSION:
            raise WireError(f"not a gossipgrad message of wire version {_VERSION}")
        if kind not in Kind.__members__.values():
            raise WireError(f"unknown kind of message {kind}")
        if dtype != 255 and dtype >= len(DTYPES):
            raise WireError(f"unknown dtype code {dtype}")
        if count > MAX_VOIDED or len(data) != _FIXED.size + count * _ROUND.size:
            raise WireError(f"{count} voided rounds do not fit a header of {len(data)} bytes")
        voided = struct.unpack_from(f"!{count}q", data, _FIXED.size)
        return cls(
            kind=Kind(kind),
            run=run,
            sender=sender,
            generation=generation,
            round=round,
            epoch=epoch,
            known=known,
            bucket=bucket,
            dtype=None if dtype == 255 else DTYPES[dtype],
            size_bytes=size,
            voided=voided,
        )
