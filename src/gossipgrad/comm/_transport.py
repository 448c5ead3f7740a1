"""The narrow waist under a channel: move one header and one payload to a rank, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

__all__ = ["Joinable", "Lost", "Received", "Sent", "Ticket", "Transport", "is_joinable"]


@runtime_checkable
class Ticket(Protocol):
    """Tells when a payload has left, so that its memory may be written again."""

    @property
    def done(self) -> bool:
        """Whether the transport has released the payload's memory."""
        ...

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until it is done, at most so long; whether it is. From any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A ticket that is done from the start: the bytes were copied, or nothing was sent."""

    done: bool = True

    def wait(self, timeout_seconds: float) -> bool:
        """It is done."""
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """One message that came in.

    Attributes:
        header: The header's bytes, unchecked.
        payload: The payload as bytes, shape `(size_bytes,)`, or None; memory is the receiver's.
    """

    header: bytes
    payload: Tensor | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The rank at the other end of a link is gone: its process died or closed its links."""

    peer: int


@runtime_checkable
class Transport(Protocol):
    """Moves messages between ranks over links: one queue a direction, made when first used.

    Messages between two ranks arrive once and in order or, if the peer dies, not at all. `send`
    may be called from any thread, `receive` from one at a time. One whose links can be made anew
    after `forget` says so by an attribute `reopens = True`.
    """

    rank: int
    world_size: int

    def open(self, peer: int) -> None:
        """Makes the link to `peer` ready and watches that it lives; idempotent."""
        ...

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Queues a message and returns at once; `payload` is contiguous and in host memory."""
        ...

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """What has come, in order; waits for the first at most `timeout_seconds`."""
        ...

    def forget(self, peer: int) -> None:
        """Drops the link to a rank that is gone, and what was queued for it."""
        ...

    def close(self, linger_seconds: float = 0.0) -> None:
        """Sends what is queued for at most `linger_seconds`, then closes every link."""
        ...


@runtime_checkable
class Joinable(Transport, Protocol):
    """A transport of a run that others may join."""

    @property
    def introduction(self) -> list[Any]:
        """What this rank introduces itself with."""
        ...

    @property
    def introductions(self) -> dict[int, list[Any]]:
        """How each rank that is known introduces itself, this one among them."""
        ...

    def add_peer(self, rank: int, introduction: Sequence[Any]) -> None:
        """Gets to know a rank that has joined; links are made when first used, here and there."""
        ...

    def beside(self, *, max_payload_bytes: int) -> "Joinable":
        """Another transport of this rank, with links of its own."""
        ...


def is_joinable(transport: object) -> TypeGuard[Joinable]:
    """Whether others may join over a transport, or over what it wraps."""
    # isinstance() does not see what a wrapper gives by __getattr__, from Python 3.12 on.
    return hasattr(transport, "add_peer")
