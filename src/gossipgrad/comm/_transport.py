"""The narrow waist under a channel: move one header and one payload to a rank, in order.

And the interface of what records spans of time there; `gossipgrad.report` writes them as a trace.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Lost", "Received", "Recorder", "Ticket", "Transport"]


@runtime_checkable
class Recorder(Protocol):
    """Records named spans of time; cheap and thread-safe."""

    def span(
        self, name: str, start_seconds: float, end_seconds: float, **attributes: object
    ) -> None:
        """Record that `name` ran from start to end, in `time.perf_counter` seconds."""
        ...


@dataclass(eq=False, slots=True)
class Ticket:
    """Tells when a payload's memory may be written again.

    Attributes:
        done: Whether nothing reads it any more: it was sent, or will not be.
        is_kept: Whether it will not be sent.
    """

    done: bool = False
    is_kept: bool = False

    def keep(self) -> None:
        """The payload will not be sent."""
        self.done = self.is_kept = True


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """One received message.

    Attributes:
        header: The header's bytes, unchecked.
        payload: The payload as bytes, shape `(size_bytes,)`, or None; owned by the receiver.
        release: Not None if the payload is the sender's memory, which must not be written: to be
            called when it is read.
    """

    header: bytes
    payload: Tensor | None
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The rank at the other end of a link is gone: its process died or closed its links."""

    peer: int


@runtime_checkable
class Transport(Protocol):
    """Moves messages between ranks over links: one queue per direction, created on first use.

    Messages between two ranks arrive once and in order or, if the peer dies, not at all. `send`
    may be called from any thread, `receive` from one at a time. After `forget` a link may be opened
    again. A transport that delivers only what a test lets it has an attribute `by_hand = True`, and
    no thread receives from it.
    """

    rank: int
    world_size: int

    def open(self, peer: int) -> None:
        """Open the link to `peer` and watch it; idempotent."""
        ...

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Queue a message and return immediately; `payload` is contiguous, in host memory.

        `ticket` is done when the payload is not read any more, also if the peer is gone.
        """
        ...

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return received messages in order; wait for some at most `timeout_seconds`, or less."""
        ...

    def wake(self) -> None:
        """Let `receive` return early; from any thread."""
        ...

    def forget(self, peer: int) -> None:
        """Drop the link to a rank that is gone, and its queued messages."""
        ...

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for at most `linger_seconds`, then close every link."""
        ...
