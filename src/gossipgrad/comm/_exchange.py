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
both, and each peer has its own exchange: POSTED to AGREED, and then one part in one direction.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gossipgrad.comm._transport import Ticket

__all__ = ["Exchange", "Ledger", "Outcome", "Position"]


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


@dataclass(eq=False, slots=True)
class Exchange:
    """One bucket of one round, with one peer.

    Attributes:
        at: Its round among those of all eras.
        bucket: Index of the bucket in the payload.
        peer: The rank at the other end; None: nothing is awaited, and nothing sent.
        receives: Whether the peer's part is awaited from it.
        ticket: Done when the posted buffer may be written again.
        sends: Whether this rank's part goes to the peer, and has not left.
        payload: This rank's part, until it has left.
        into: The memory for the partner's part; None: memory of its own.
        is_filled: Returns whether `payload` is filled; None if it is.
        on_arrival: Called when the partner's part has arrived, in the thread that receives.
        outcome: How it ended; `LATE` while it is open.
        received: The partner's part, flat, in host memory; only when `DELIVERED`.
        release: Not None if `received` is the partner's memory, which must not be written: to be
            called when it is read.
        posted_seconds: When it was posted (`time.perf_counter`).
        agreed_seconds: When both ends were ready; None before that.
        finished_seconds: When it ended, None while it is open.
    """

    at: Position
    bucket: int
    peer: int | None
    receives: bool
    ticket: Ticket
    sends: bool = False
    payload: Tensor | None = None
    into: Tensor | None = None
    is_filled: Callable[[], bool] | None = None
    on_arrival: "Callable[[Exchange], None] | None" = None
    outcome: Outcome = Outcome.LATE
    received: Tensor | None = None
    release: Callable[[], None] | None = None
    posted_seconds: float = field(default_factory=time.perf_counter)
    agreed_seconds: float | None = None
    finished_seconds: float | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether the peer has said READY, too."""
        return self.agreed_seconds is not None

    @property
    def open(self) -> bool:
        """Whether the partner's part can still arrive."""
        return self.outcome is Outcome.LATE

    def finish(self, outcome: Outcome, received: Tensor | None = None) -> None:
        """Close the exchange, once."""
        assert self.open, self
        self.received = received
        self.finished_seconds = time.perf_counter()
        self.outcome = outcome  # last: other threads read it without a lock

    def release_part(self) -> None:
        """Let the partner write its memory again, once; from any thread."""
        release, self.release = self.release, None
        if release is not None:
            release()

    def end(self, outcome: Outcome) -> None:
        """End it without the peer's part, and keep this rank's part if it has not left."""
        if self.sends:
            self.payload = self.is_filled = None
            self.ticket.keep()
        if self.open:
            self.finish(outcome)
        self.sends = self.receives = False


@dataclass(eq=False, slots=True)
class Ledger:
    """The state of one link; no threads, and nothing is sent from here."""

    posted: dict[Position, dict[int, Exchange]] = field(default_factory=dict)  # and not over
    awaited: set[tuple[Position, int]] = field(default_factory=set)  # the peer alone is READY
    past: Position = _START  # this rank says READY to no round before this one any more
    latest: Position = _START  # nor does the peer to a round before this one
    told: Position = _START  # the last round that the peer knows to be void here
    kept_bytes: int = 0  # of parts that were posted, and will not leave

    def post(self, exchange: Exchange, *, window: int, is_alive: bool = True) -> bool:
        """Post an exchange; return whether to say READY to the peer. If not, it is over here."""
        at, key = exchange.at, (exchange.at, exchange.bucket)
        assert exchange.bucket not in self.posted.get(at, ()), f"round {at.round} is posted twice"
        self.prune(before=at)
        is_behind = at < self.latest
        is_early = exchange.receives and (at.era > self.latest.era or self._is_full(at, window))
        if not is_alive:
            exchange.end(Outcome.DEAD_PEER)
        elif at < self.past or (key not in self.awaited and (is_behind or is_early)):
            exchange.end(Outcome.VOID)
        else:
            self.posted.setdefault(at, {})[exchange.bucket] = exchange
            return True
        self.awaited.discard(key)
        return False

    def agree(self, at: Position, bucket: int) -> Exchange | None:
        """The peer has said READY, now or before; return what is agreed, None if nothing is."""
        exchange = self.find(at, bucket)
        if exchange is not None:
            self.awaited.discard((at, bucket))
            exchange.agreed_seconds = time.perf_counter()
        elif at >= self.past:
            self.awaited.add((at, bucket))
        return exchange

    def leave(self, exchange: Exchange) -> Tensor:
        """Return this rank's part, which leaves; it is over here if the peer's is not awaited."""
        payload = exchange.payload
        assert payload is not None
        exchange.payload, exchange.sends = None, False
        if not exchange.receives:
            self._remove(exchange)
        return payload

    def deliver(
        self,
        at: Position,
        bucket: int,
        values: Tensor,
        release: Callable[[], None] | None = None,
    ) -> Exchange | None:
        """The peer's part has arrived; return its exchange if that was open."""
        # Parts arrive in order: one that is missing was lost with a link that was made again.
        for exchange in self.all_posted():
            if exchange.at < at and exchange.receives:
                self._end(exchange, Outcome.VOID)
        exchange = self.find(at, bucket)
        if exchange is None or not exchange.receives:
            return None
        exchange.receives = False
        if not exchange.sends:
            self._remove(exchange)
        exchange.release = release
        exchange.finish(Outcome.DELIVERED, values)
        return exchange

    def find(self, at: Position, bucket: int) -> Exchange | None:
        """Return a posted exchange that is not over."""
        return self.posted.get(at, {}).get(bucket)

    def advance(self, at: Position) -> None:
        """The peer says READY to no round before `at` any more."""
        self.latest = max(self.latest, at)
        for exchange in self.all_posted():
            if exchange.at < at and not exchange.is_agreed:
                self._end(exchange, Outcome.VOID)

    def take_back(self, at: Position, bucket: int) -> None:
        """The peer has taken its READY back, and sends no part."""
        self.awaited.discard((at, bucket))
        if (exchange := self.find(at, bucket)) is not None:
            self._end(exchange, Outcome.VOID)

    def cancel(self, exchange: Exchange) -> bool:
        """End an open exchange; return whether to take READY back. An agreed part is dropped."""
        self.prune(before=exchange.at.next)
        if not exchange.is_agreed:
            self._end(exchange, Outcome.VOID)
            return True
        exchange.receives = False
        if not exchange.sends:
            self._remove(exchange)
        exchange.finish(Outcome.VOID)
        return False

    def end(self) -> None:
        """End all exchanges: the peer is gone."""
        for exchange in self.all_posted():
            self._end(exchange, Outcome.DEAD_PEER)
        self.awaited.clear()

    def prune(self, before: Position) -> None:
        """This rank says READY to no round before `before` any more."""
        if before > self.past:
            self.past = before
            if self.awaited:
                self.awaited = {key for key in self.awaited if key[0] >= before}

    def all_posted(self) -> list[Exchange]:
        """Return everything that is not over."""
        return [each for buckets in self.posted.values() for each in buckets.values()]

    def _is_full(self, at: Position, window: int) -> bool:
        """Whether a further round is one too many; those of earlier eras do not count."""
        rounds = {each.at for each in self.all_posted() if each.receives and each.at.era == at.era}
        return at not in self.posted and len(rounds) >= window

    def _end(self, exchange: Exchange, outcome: Outcome) -> None:
        if exchange.sends:
            assert exchange.payload is not None
            self.kept_bytes += exchange.payload.nbytes
        self._remove(exchange)
        exchange.end(outcome)

    def _remove(self, exchange: Exchange) -> None:
        del self.posted[exchange.at][exchange.bucket]
        if not self.posted[exchange.at]:
            del self.posted[exchange.at]
