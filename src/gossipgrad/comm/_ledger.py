"""The states of an exchange with a peer, and the state that each link keeps for them.

The states of one exchange with a peer, from this rank's side:

    posted ──the peer's part is here already──────────> DELIVERED
      │ the peer voided the round, is past it, or has
      │ not entered this era ─────────────────────────> VOID   (nothing was sent)
      │ the peer is gone ─────────────────────────────> DEAD_PEER
      v
    open (LATE) ──the peer's part arrives─────────────> DELIVERED
      │ the peer names the round void, or a later one ─> VOID
      │ this rank voids it ───────────────────────────> VOID   (the part is dropped if it arrives)
      └ the peer leaves or is lost ───────────────────> DEAD_PEER

Messages of one link arrive in order, and rounds on it rise. So a message of a later round or era
arrives after all parts of earlier ones. A part that is missing then was never sent: both ends count
its exchange as void.
"""

import enum
import time
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from gossipgrad.comm._transport import Sent, Ticket

__all__ = ["LOST", "Exchange", "Ledger", "Outcome", "place"]

T = TypeVar("T")

LOST = "was lost"

_EARLY_ROUNDS = 16  # how many rounds ahead of this rank a partner's parts are kept
_EPOCH_BITS = 32  # as on the wire
_ROUND_BITS = 40


class Outcome(enum.Enum):
    """How an exchange ended. Never an exception: a late or dead partner is ordinary."""

    DELIVERED = "delivered"
    """Both parts were sent and the partner's has arrived."""
    LATE = "late"
    """The partner's part has not arrived in time; it may still be taken later."""
    DEAD_PEER = "dead_peer"
    """The partner died or left the run before sending its part."""
    VOID = "void"
    """One end voided the round before sending its part; it counts on neither."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One bucket of one round, posted on a channel.

    Attributes:
        round: The exchange's round.
        bucket: Index of the bucket in the payload.
        send_to: The rank that gets this rank's part, None for none.
        recv_from: The rank whose part is awaited, None for none.
        at: The position of its round among those of all eras (`place`).
        outcome: How it ended; `LATE` while it is open.
        received: The partner's part, flat, in host memory; only when `DELIVERED`.
        ticket: Done when the posted buffer may be written again.
        posted_seconds: When it was posted (`time.perf_counter`).
        finished_seconds: When it ended, None while it is open.
    """

    round: int
    bucket: int
    send_to: int | None
    recv_from: int | None
    at: int
    outcome: Outcome = Outcome.LATE
    received: Tensor | None = None
    ticket: Ticket = field(default_factory=Sent)
    posted_seconds: float = field(default_factory=time.perf_counter)
    finished_seconds: float | None = None

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


def place(generation: int, epoch: int, round: int) -> int:
    """Return a round's position among the rounds of all eras (generations and their epochs).

    Example:
        >>> place(0, 0, 7) == 7, place(1, 0, 0) > place(0, 1, 0) > place(0, 0, 7)
        (True, True)
    """
    return (((generation << _EPOCH_BITS) | epoch) << _ROUND_BITS) + round


def _era(at: int) -> int:
    return max(at, 0) >> _ROUND_BITS


@dataclass(eq=False, slots=True)
class Ledger:
    """The state of one link. Rounds are named by their positions (`place`).

    Attributes:
        open: Exchanges that wait for the peer's part, by position, then by bucket.
        early: Parts that arrived before this rank posted their round, by position, then by bucket.
        past: This rank sends no further part of rounds before this one, and expects only open
            exchanges of them.
        given_up: The last round that this rank has declared void.
        latest: The peer sends no further part of rounds before this one; only parts of open
            exchanges may be in flight.
        gone: How the peer ended, None while it lives.
        was_notified: Whether a lost peer that still sends was notified.
    """

    open: dict[int, dict[int, Exchange]] = field(default_factory=dict)
    early: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    past: int = -1
    given_up: int = -1
    latest: int = -1
    gone: str | None = None
    was_notified: bool = False

    def post(self, exchange: Exchange, *, credits: int) -> None:
        """Open an exchange, or end it immediately, by the peer's state.

        Args:
            exchange: Of a later position than all before it.
            credits: How many rounds of an era may be open.
        """
        assert exchange.bucket not in self.open.get(exchange.at, {}), (
            f"round {exchange.round} is posted twice"
        )
        self.prune(before=exchange.at)
        early = _take(self.early, exchange.at, exchange.bucket)
        # A part of a dead peer counts only if this rank owed it none.
        if early is not None and (self.gone is None or exchange.send_to != exchange.recv_from):
            exchange.finish(Outcome.DELIVERED, early)
        elif self.gone is not None:
            exchange.finish(Outcome.DEAD_PEER)
        elif self._is_refused(exchange.at, credits):
            exchange.finish(Outcome.VOID)
        else:
            self.open.setdefault(exchange.at, {})[exchange.bucket] = exchange

    def deliver(self, at: int, bucket: int, values: Tensor) -> bool:
        """Accept the peer's part; return False if it is too far ahead to be kept."""
        exchange = _take(self.open, at, bucket)
        if exchange is not None:
            exchange.finish(Outcome.DELIVERED, values)
        elif at >= self.past:
            if at not in self.early and len(self.early) >= _EARLY_ROUNDS:
                return False
            self.early.setdefault(at, {})[bucket] = values
        return True

    def advance(self, at: int) -> None:
        """End open exchanges of rounds before `at`, which the peer will never send."""
        self.latest = max(self.latest, at)
        self._finish_open(Outcome.VOID, before=at)

    def cancel(self, exchange: Exchange) -> None:
        """End an open exchange; the peer's part is dropped if it arrives."""
        _take(self.open, exchange.at, exchange.bucket)
        self.prune(before=exchange.at + 1)
        exchange.finish(Outcome.VOID)

    def end(self, how: str) -> None:
        """Record that the peer is gone; early parts stay valid if no part was owed in return."""
        self.gone = how
        self._finish_open(Outcome.DEAD_PEER)
        if how == LOST:
            self.early.clear()

    def prune(self, before: int) -> None:
        """Drop early parts of rounds before `before`, which this rank is past."""
        if before > self.past:
            self.past = before
            for at in [at for at in self.early if at < before]:
                del self.early[at]

    def _is_refused(self, at: int, credits: int) -> bool:
        if at < max(self.past, self.latest) or _era(at) > _era(self.latest):
            return True
        # Exchanges of an earlier era end when the peer enters this one, at the latest.
        others = [other for other in self.open if _era(other) == _era(at) and other != at]
        return len(others) >= credits

    def _finish_open(self, outcome: Outcome, before: int | None = None) -> None:
        for at in [at for at in self.open if before is None or at < before]:
            for exchange in self.open.pop(at).values():
                exchange.finish(outcome)


def _take(held: dict[int, dict[int, T]], at: int, bucket: int) -> T | None:
    """Remove one bucket of a round, None if it is not there."""
    of_round = held.get(at, {})
    found = of_round.pop(bucket, None)
    if found is not None and not of_round:
        del held[at]
    return found
