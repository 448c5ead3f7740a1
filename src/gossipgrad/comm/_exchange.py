"""One exchange with a partner, and how it can end."""

import enum
import time
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._transport import Sent, Ticket

__all__ = ["Exchange", "Outcome"]


class Outcome(enum.Enum):
    """How taking an exchange ended. Never an exception: a late or dead partner is ordinary."""

    DELIVERED = "delivered"
    """Both parts were sent and the partner's is here."""
    LATE = "late"
    """The partner's part has not come in time; it may still be taken later."""
    DEAD_PEER = "dead_peer"
    """The partner died or left the run before sending its part."""
    VOID = "void"
    """One end gave the round up before sending its part; it counts on neither."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One bucket of one round, posted on a channel.

    Attributes:
        round: The round it belongs to.
        bucket: Which bucket of the payload.
        send_to: The rank that gets this rank's part, None if no one.
        recv_from: The rank whose part is awaited, None if no one.
        outcome: How it ended; `LATE` as long as it is open.
        received: The partner's part, flat, in host memory; only when `DELIVERED`.
        ticket: Done when the buffer that was posted may be written again.
        posted_seconds: When it was posted (`time.perf_counter`).
        at: The place of its round among those of all eras (`place`).
    """

    round: int
    bucket: int
    send_to: int | None
    recv_from: int | None
    outcome: Outcome = Outcome.LATE
    received: Tensor | None = None
    ticket: Ticket = field(default_factory=Sent)
    posted_seconds: float = field(default_factory=time.perf_counter)
    finished_seconds: float | None = None
    at: int = -1

    @property
    def open(self) -> bool:
        """Whether the partner's part can still come."""
        return self.outcome is Outcome.LATE

    def finish(self, outcome: Outcome, received: Tensor | None = None) -> None:
        """Closes the exchange, once."""
        assert self.open, self
        self.received = received
        self.finished_seconds = time.perf_counter()
        self.outcome = outcome  # last: other threads look at it without a lock
