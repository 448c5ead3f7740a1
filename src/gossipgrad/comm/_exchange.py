"""One exchange: a state machine for each peer, round and bucket; and the link that they share.

    rank A                                              rank B
    posts round r: its buffers exist ── READY(r) ──>
                                      <── READY(r) ──   posts round r
    both know: part of A ──────────────────────────>    received into the posted buffer
                         <────────────────────────────  part of B

READY is the flow control: a part leaves when its sender knows that the receiver waits for it, so
nothing arrives early, and nothing is kept or copied. The states, from this rank's side:

    nothing ──the peer says READY──────> AWAITED
      │ this rank posts                    │ this rank posts: it says READY, and its part leaves
      v                                    v
    POSTED ────the peer says READY──────> AGREED ──the peer's part arrives──> DELIVERED
      │ the peer voids the round, or is      │ the peer takes its READY back ──> VOID
      │ past it ──────────────────> VOID     │ this rank drops the part ───────> VOID (here alone)
      │ this rank takes READY back > VOID    └ the peer is gone ───────────────> DEAD_PEER
      └ the peer is gone ─────> DEAD_PEER

An exchange counts iff both ends have said READY, and neither took it back. A rank may do so only
while it is POSTED: then it has not heard the peer's READY, and has sent no part.

1. A and B have posted, and each other's READY is under way.
2. A gives the round up, and takes its READY back: B hears READY, sends its part, and then hears
   that A took it back: VOID at B. The part of B finds nothing posted at A: VOID at A.
3. Had A heard B's READY before, its part would be on the way to B: so then it may not.

Messages of one link arrive in order, and each rank names its rounds in rising order. So when a peer
names a later round or era, it says READY to no earlier one any more. What it said stays: parts of
AGREED exchanges arrive whatever the peer does next, a collective or another generation.

In a round of directed pairs a rank receives from one peer and sends to another. It says READY to
both, and each link has its own exchange: POSTED to AGREED, and then one part in one direction.
"""

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gossipgrad.comm._transport import Sent, Ticket

__all__ = ["Exchange", "Ledger", "Outcome", "Position", "Posted"]


class Outcome(enum.Enum):
    """How an exchange ended. Never an exception: a late or dead partner is ordinary."""

    DELIVERED = "delivered"
    """Both ends were ready and the partner's part has arrived."""
    LATE = "late"
    """The partner's part has not arrived in time; it may still be taken later."""
    DEAD_PEER = "dead_peer"
    """The partner died or left the run before sending its part."""
    VOID = "void"
    """One end voided the round before sending its part; it counts on neither."""


class Position(NamedTuple):
    """A round among those of all eras: generations, and epochs between two collectives in them."""

    generation: int
    epoch: int
    round: int

    @property
    def era(self) -> tuple[int, int]:
        """Its generation and epoch."""
        return self[:2]

    @property
    def next(self) -> "Position":
        """The position of the next round in this era."""
        return Position(self.generation, self.epoch, self.round + 1)


_START = Position(0, 0, -1)


class _Leaving:
    """The ticket of a part that leaves when both ends are ready."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self._ticket: Ticket = Sent()

    @property
    def done(self) -> bool:
        return self._left.is_set() and self._ticket.done

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        left = self._left.wait(timeout_seconds)
        return left and self._ticket.wait(max(0.0, deadline - time.monotonic()))

    def leave(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._left.set()


@dataclass(eq=False, slots=True)
class Exchange:
    """One bucket of one round, posted on a channel.

    Attributes:
        at: Its round among those of all eras.
        bucket: Index of the bucket in the payload.
        send_to: The rank that gets this rank's part, None for none.
        recv_from: The rank whose part is awaited, None for none.
        payload: This rank's part, until it has left or will not.
        into: The memory for the partner's part; None: memory of its own.
        ready: Returns when `payload` is filled; None if it is.
        on_arrival: Called when the partner's part has arrived, in the thread that receives.
        outcome: How it ended; `LATE` while it is open.
        received: The partner's part, flat, in host memory; only when `DELIVERED`.
        ticket: Done when the posted buffer may be written again.
        posted_seconds: When it was posted (`time.perf_counter`).
        agreed_seconds: When both ends were ready; None before that.
        finished_seconds: When it ended, None while it is open.
    """

    at: Position
    bucket: int
    send_to: int | None
    recv_from: int | None
    payload: Tensor | None = None
    into: Tensor | None = None
    ready: Callable[[], None] | None = None
    on_arrival: Callable[[], None] | None = None
    outcome: Outcome = Outcome.LATE
    received: Tensor | None = None
    ticket: Ticket = field(default_factory=Sent)
    posted_seconds: float = field(default_factory=time.perf_counter)
    agreed_seconds: float | None = None
    finished_seconds: float | None = None
    _leaving: _Leaving | None = None

    @property
    def round(self) -> int:
        """The exchange's round."""
        return self.at.round

    @property
    def open(self) -> bool:
        """Whether the partner's part can still arrive."""
        return self.outcome is Outcome.LATE

    @property
    def gives(self) -> bool:
        """Whether this rank's part has left, or may still leave."""
        return self._leaving is not None

    def expect_to_send(self) -> None:
        """Hold the payload until `leave` or `keep`."""
        self.ticket = self._leaving = _Leaving()

    def leave(self, ticket: Ticket) -> None:
        """The part has left."""
        assert self._leaving is not None
        self._leaving.leave(ticket)
        self.payload = self.ready = None

    def keep(self) -> None:
        """The part will not leave."""
        if self._leaving is not None and self.payload is not None:
            leaving, self._leaving = self._leaving, None
            self.payload = self.ready = None
            leaving.leave(Sent())

    def finish(self, outcome: Outcome, received: Tensor | None = None) -> None:
        """Close the exchange, once."""
        assert self.open, self
        self.received = received
        self.finished_seconds = time.perf_counter()
        self.outcome = outcome  # last: other threads read it without a lock


@dataclass(eq=False, slots=True)
class Posted:
    """What an exchange is on one link.

    Attributes:
        exchange: The exchange.
        sends: Whether this rank's part goes over the link, and has not left.
        receives: Whether the peer's part is awaited from it.
        is_agreed: Whether the peer has said READY, too.
    """

    exchange: Exchange
    sends: bool
    receives: bool
    is_agreed: bool = False


@dataclass(eq=False, slots=True)
class Ledger:
    """The state of one link; no threads, and nothing is sent from here.

    Attributes:
        posted: What this rank has said READY to and is not over, by position and bucket.
        awaited: Positions and buckets that the peer has said READY to before this rank.
        past: This rank says READY to no round before this one any more.
        latest: Nor does the peer to a round before this one.
        given_up: The last round that this rank has declared void.
        was_notified: Whether a lost peer that still sends was notified.
        kept_bytes: Of parts that were posted, and will not leave.
    """

    posted: dict[Position, dict[int, Posted]] = field(default_factory=dict)
    awaited: set[tuple[Position, int]] = field(default_factory=set)
    past: Position = _START
    latest: Position = _START
    given_up: Position = _START
    was_notified: bool = False
    kept_bytes: int = 0

    def post(
        self,
        exchange: Exchange,
        *,
        sends: bool,
        receives: bool,
        window: int,
        is_alive: bool = True,
    ) -> bool:
        """Post an exchange; return whether to say READY to the peer. If not, it is over here.

        Args:
            exchange: Of no earlier round than those before it.
            sends: Whether its part goes to the peer.
            receives: Whether the peer's part is awaited.
            window: How many rounds of an era may be open.
            is_alive: Whether the peer can be reached.
        """
        at, posted = exchange.at, Posted(exchange, sends, receives)
        assert exchange.bucket not in self.posted.get(at, ()), f"round {at.round} is posted twice"
        self.prune(before=at)
        outcome = None
        if not is_alive:
            outcome = Outcome.DEAD_PEER
        elif at < self.past or (
            (at, exchange.bucket) not in self.awaited
            and (
                at < self.latest
                or (receives and (at.era > self.latest.era or self._is_full(at, window)))
            )
        ):
            outcome = Outcome.VOID
        if outcome is None:
            self.posted.setdefault(at, {})[exchange.bucket] = posted
            return True
        self.awaited.discard((at, exchange.bucket))
        _end(posted, outcome)
        return False

    def agree(self, at: Position, bucket: int) -> Posted | None:
        """The peer has said READY, now or before; return what is agreed, None if nothing is."""
        posted = self.posted.get(at, {}).get(bucket)
        if posted is not None:
            self.awaited.discard((at, bucket))
            posted.is_agreed = True
            if posted.receives:
                posted.exchange.agreed_seconds = time.perf_counter()
        elif at >= self.past:
            self.awaited.add((at, bucket))
        return posted

    def sent(self, posted: Posted) -> None:
        """This rank's part has left; the exchange is over on this link if none is awaited."""
        posted.sends = False
        if not posted.receives:
            self._remove(posted.exchange.at, posted.exchange.bucket)

    def deliver(self, at: Position, bucket: int, values: Tensor) -> Exchange | None:
        """The peer's part has arrived; return its exchange if that was open.

        Parts arrive in the order of their rounds: one that is missing was lost with a link that was
        made again since.
        """
        for earlier in [position for position in self.posted if position < at]:
            for missing in [b for b, p in self.posted[earlier].items() if p.receives]:
                self._end(self._remove(earlier, missing), Outcome.VOID)
        posted = self.posted.get(at, {}).get(bucket)
        if posted is None or not posted.receives:
            return None
        posted.receives = False
        if not posted.sends:
            self._remove(at, bucket)
        posted.exchange.finish(Outcome.DELIVERED, values)
        return posted.exchange

    def awaits(self, at: Position, bucket: int) -> Exchange | None:
        """Return the exchange that a part is for, None if none is open."""
        posted = self.posted.get(at, {}).get(bucket)
        return posted.exchange if posted is not None and posted.receives else None

    def advance(self, at: Position) -> None:
        """The peer says READY to no round before `at` any more."""
        self.latest = max(self.latest, at)
        for earlier in [position for position in self.posted if position < at]:
            for bucket in [b for b, p in self.posted[earlier].items() if not p.is_agreed]:
                self._end(self._remove(earlier, bucket), Outcome.VOID)

    def take_back(self, at: Position, bucket: int) -> None:
        """The peer has taken its READY back, and sends no part."""
        self.awaited.discard((at, bucket))
        if bucket in self.posted.get(at, ()):
            self._end(self._remove(at, bucket), Outcome.VOID)

    def cancel(self, exchange: Exchange) -> bool:
        """End an open exchange; return whether to take READY back.

        If both ends are agreed, the peer counts the exchange nevertheless: its part is dropped.
        """
        at, bucket = exchange.at, exchange.bucket
        self.prune(before=at.next)
        if not self.posted[at][bucket].is_agreed:
            self._end(self._remove(at, bucket), Outcome.VOID)
            return True
        posted = self.posted[at][bucket]
        posted.receives = False
        if not posted.sends:
            self._remove(at, bucket)
        exchange.finish(Outcome.VOID)
        return False

    def end(self) -> None:
        """End all exchanges: the peer is gone."""
        for at in [*self.posted]:
            for posted in self.posted.pop(at).values():
                self._end(posted, Outcome.DEAD_PEER)
        self.awaited.clear()

    def prune(self, before: Position) -> None:
        """This rank says READY to no round before `before` any more."""
        if before > self.past:
            self.past = before
            self.awaited = {key for key in self.awaited if key[0] >= before}

    def all_posted(self) -> list[Posted]:
        """Everything that is not over."""
        return [posted for buckets in self.posted.values() for posted in buckets.values()]

    def _is_full(self, at: Position, window: int) -> bool:
        """Whether a further round is one too many; those of earlier eras do not count."""
        if at in self.posted:
            return False
        rounds = [other for other in self.posted if other.era == at.era]
        return sum(any(p.receives for p in self.posted[r].values()) for r in rounds) >= window

    def _end(self, posted: Posted, outcome: Outcome) -> None:
        if posted.sends:
            assert posted.exchange.payload is not None
            self.kept_bytes += posted.exchange.payload.nbytes
        _end(posted, outcome)

    def _remove(self, at: Position, bucket: int) -> Posted:
        posted = self.posted[at].pop(bucket)
        if not self.posted[at]:
            del self.posted[at]
        return posted


def _end(posted: Posted, outcome: Outcome) -> None:
    if posted.sends:
        posted.exchange.keep()
    if posted.receives and posted.exchange.open:
        posted.exchange.finish(outcome)
