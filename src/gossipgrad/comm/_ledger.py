"""What stands between this rank and each peer: open exchanges, early parts, void rounds.

The states of one exchange with a peer, from this rank's side:

    posted ──peer's part is here already──────────────> DELIVERED
      │ peer gave the round up, is past it, or has not
      │ come to this era ─────────────────────────────> VOID   (nothing was sent)
      │ peer is gone ─────────────────────────────────> DEAD_PEER
      v
    open (LATE) ──the peer's part arrives─────────────> DELIVERED
      │ the peer names the round void, or a later one ─> VOID
      │ this rank gives it up ────────────────────────> VOID   (the part is dropped should it come)
      └ the peer leaves or is lost ───────────────────> DEAD_PEER

Messages of one link arrive in order, and rounds on it rise. So whatever the peer says of a later
round, of a collective (FENCE) or of a new generation (ENTER) comes behind all parts that it has
sent before, and what is still open then it has never sent: both ends count it as void.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Outcome

__all__ = ["LOST", "Ledger", "Ledgers", "era_of", "place"]

LOST = "was lost"

_EARLY_ROUNDS = 16  # how far ahead of us a partner's parts are kept
_EPOCH_BITS = 32  # as on the wire
_ROUND_BITS = 40

Key = tuple[int, int]  # place of the round, bucket


def place(generation: int, epoch: int, round: int) -> int:
    """Where a round stands among the rounds of all eras, which are generations and their epochs.

    Example:
        >>> place(0, 0, 7) == 7, place(1, 0, 0) > place(0, 1, 0) > place(0, 0, 7)
        (True, True)
    """
    return (((generation << _EPOCH_BITS) | epoch) << _ROUND_BITS) + round


def era_of(at: int) -> int:
    """The era of a place; 0 for what comes before the first round."""
    return max(at, 0) >> _ROUND_BITS


@dataclass(eq=False, slots=True)
class Ledger:
    """The state of one link. Rounds are named by their places (`place`).

    Attributes:
        open: Exchanges that wait for the peer's part.
        early: Parts that arrived before this rank posted the round.
        given_up: The last round this rank voided before sending its part. Its rounds rise, so it
            posts nothing more of that one, nor of any before.
        cancelled: Rounds of which this rank expects nothing any more, though it sent its part.
        past: Rounds before this one are posted no more, and expected only if they are open.
        voided: Rounds the peer gave up.
        latest: The highest round heard of; nothing arrives of an earlier one any more.
        era: The latest era that the peer is known to have entered.
        gone: How the peer ended, None while it lives.
        was_notified: Whether a peer that was lost, and still sends, was notified that it is.
        is_absent: Whether the peer has joined, and takes no part in rounds yet.
    """

    open: dict[Key, Exchange] = field(default_factory=dict)
    early: dict[Key, Tensor] = field(default_factory=dict)
    given_up: int = -1
    cancelled: set[int] = field(default_factory=set)
    past: int = -1
    voided: set[int] = field(default_factory=set)
    latest: int = -1
    era: int = 0
    gone: str | None = None
    was_notified: bool = False
    is_absent: bool = False

    @property
    def early_bytes(self) -> int:
        """Memory of the parts that arrived early."""
        return sum(values.numel() * values.itemsize for values in self.early.values())

    def refusal(self, round: int, *, credits: int) -> Outcome | None:
        """Why a round with the peer cannot be, or None if it can."""
        if self.gone is not None:
            return Outcome.DEAD_PEER
        if round < self.latest or era_of(round) > self.era:
            return Outcome.VOID  # the peer is past it, or has not entered this era yet
        if round in self.voided or round <= self.given_up or round in self.cancelled:
            return Outcome.VOID
        others = {other for other, _ in self.open} - {round}
        return Outcome.VOID if len(others) >= credits else None

    def advance(self, at: int) -> None:
        """The peer is at a place: what is open before it was never sent."""
        self.latest = max(self.latest, at)
        self.era = max(self.era, era_of(at))
        self.resolve(lambda earlier: earlier < at, Outcome.VOID)
        _discard(self.cancelled, at)

    def void(self, at: int) -> None:
        """The peer has given a round up."""
        self.voided.add(at)
        self.resolve(lambda open_at: open_at == at, Outcome.VOID)

    def deliver(self, at: int, bucket: int, values: Tensor, *, here: int) -> bool:
        """Accepts the peer's part; False if it is too far ahead to be kept.

        Args:
            at: Its round.
            bucket: Which part it is.
            values: The part.
            here: The era of this rank: of an earlier one it posts nothing any more.
        """
        key = (at, bucket)
        exchange = self.open.pop(key, None)
        if exchange is not None:
            exchange.finish(Outcome.DELIVERED, values)
            return True
        if at <= self.given_up or at < self.past or at in self.cancelled or era_of(at) < here:
            return True
        if len({early for early, _ in self.early} - {at}) >= _EARLY_ROUNDS:
            return False
        self.early[key] = values
        return True

    def give_up(self, at: int) -> None:
        """Voids a round before anything of it was sent."""
        _discard(self.voided, at)
        self.given_up = at
        self._drop_early(lambda other: other <= at)

    def take_early(self, key: Key, *, mutual: bool) -> Tensor | None:
        """The peer's early part; none of one that is gone, and gets no part in return."""
        values = self.early.pop(key, None)
        return None if mutual and self.gone is not None else values

    def cancel(self, exchange: Exchange) -> None:
        """Ends an open exchange; the peer's part is dropped should it arrive."""
        self.open.pop((exchange.at, exchange.bucket))
        self.cancelled.add(exchange.at)
        exchange.finish(Outcome.VOID)

    def cancel_all(self) -> None:
        """Ends all open exchanges."""
        for exchange in list(self.open.values()):
            self.cancel(exchange)

    def end(self, how: str, *, keep_early: bool) -> None:
        """The peer is gone; what it sent before it left may be used where it gets nothing back."""
        self.gone = how
        self.resolve(lambda at: True, Outcome.DEAD_PEER)
        if not keep_early:
            self.early.clear()

    def resolve(self, which: Callable[[int], bool], outcome: Outcome) -> None:
        """Ends the open exchanges of some rounds."""
        for key in [key for key in self.open if which(key[0])]:
            self.open.pop(key).finish(outcome)

    def prune(self, before: int) -> None:
        """Forgets what no round from `before` on needs."""
        self.past = max(self.past, before)
        self._drop_early(lambda at: at < before)
        _discard(self.voided, before)
        _discard(self.cancelled, before)

    def _drop_early(self, which: Callable[[int], bool]) -> None:
        for key in [key for key in self.early if which(key[0])]:
            del self.early[key]


class Ledgers(defaultdict[int, Ledger]):
    """A ledger for each peer, made when first needed.

    Args:
        rank: This one; it has no ledger.
        members: The ranks at the start, this one among them or not.

    Attributes:
        peers: All other ranks that were members in a generation that this rank has lived in.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        super().__init__(Ledger)
        self._rank = rank
        self.peers = set(members) - {rank}

    @property
    def early_bytes(self) -> int:
        """Memory of what arrived before this rank posted its round."""
        return sum(ledger.early_bytes for ledger in self.values())

    @property
    def gone(self) -> dict[int, str]:
        """Who left or was lost, with which of the two."""
        return {peer: how for peer, to in self.items() if (how := to.gone) is not None}

    def may_send(self, sender: int, generation: int, *, here: int) -> bool:
        """Whether a message of a generation may be of a rank, where this one lives in `here`.

        One that joins may send before this rank has heard of its generation.
        """
        return sender in self.peers or generation > here

    def alive(self, peers: Iterable[int]) -> list[int]:
        """Those who were members here and are not known to be gone."""
        return [peer for peer in peers if peer in self.peers and self[peer].gone is None]

    def enter(self, living: Collection[int], *, reopens: bool) -> None:
        """Goes on among those who live: links that were lost are made anew, or new ones met."""
        peers = set(living) - {self._rank}
        for peer in self.keys() - peers:
            self[peer].early.clear()
        for peer in peers:
            if reopens and peer in self and self[peer].gone == LOST:
                self[peer] = Ledger()
            if peer not in self.peers and self[peer].latest < 0:
                self[peer].is_absent = True
        self.peers |= peers

    def resume(self, first: int, last: Mapping[int, int]) -> None:
        """A collective is over: rounds go on at the place `first`.

        Args:
            first: The place.
            last: Of each rank that was there the place of the last round that it has posted.
        """
        for peer in self.peers:
            end = last.get(peer, -1)
            self[peer].resolve(lambda at, end=end: at > end, Outcome.VOID)
            if peer in last:
                self[peer].era = max(self[peer].era, era_of(first))
            self[peer].prune(before=first)


def _discard(rounds: set[int], before: int) -> None:
    rounds.difference_update([round for round in rounds if round < before])
