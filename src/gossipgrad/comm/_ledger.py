"""What stands between this rank and one peer: open exchanges, early parts, voided rounds."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Outcome
from gossipgrad.comm._place import generation_of

__all__ = ["Ledger"]

_EARLY_ROUNDS = 16  # how far ahead of us a partner's parts are kept
_NAMED_ROUNDS = 64  # void rounds named one by one to a peer that is silent

Key = tuple[int, int]  # place of the round, bucket


@dataclass(eq=False, slots=True)
class Ledger:
    """The state of one link. Its messages come in order, of rising rounds.

    Rounds are told by their places, which order generations, too (`place`).

    Attributes:
        open: Exchanges that await the peer's part.
        early: Parts that came before this rank posted the round.
        given_up: The last round this rank voided before sending its part. Its rounds rise, so it
            posts nothing more of that one, nor of any before.
        silent_rounds: How many it gave up since the peer was last heard, or got a part that it need
            not answer.
        named_rounds: How many of those there were when one was last named to the peer.
        cancelled: Rounds this rank awaits nothing of any more, though it sent its part.
        past: Rounds before this one are posted no more, and awaited only if they are open.
        voided: Rounds the peer gave up, or sent in vain.
        era: The peer's latest generation, of which are `known`, `over` and `heard`.
        known: The peer's last settlement that is known here: it came to a collective.
        known_before: The same of its earlier generations.
        over: The last of them that is over, whatever became of the collective.
        heard: The last settlement of this rank that the peer has heard of.
        settled_at: The peer's last round before its last settlement.
        latest: The highest round heard of; nothing comes of an earlier one any more.
        gone: How the peer ended, None while it lives.
        parted: Whether a peer that was lost, and still speaks, was told that it is.
        absent: Whether the peer has joined, and takes no part in rounds yet.
    """

    open: dict[Key, Exchange] = field(default_factory=dict)
    early: dict[Key, Tensor] = field(default_factory=dict)
    given_up: int = -1
    silent_rounds: int = 0
    named_rounds: int = 0
    cancelled: set[int] = field(default_factory=set)
    past: int = -1
    voided: set[int] = field(default_factory=set)
    era: int = 0
    known: int = 0
    known_before: dict[int, int] = field(default_factory=dict)
    over: int = 0
    heard: int = 0
    settled_at: int = -1
    latest: int = -1
    gone: str | None = None
    parted: bool = False
    absent: bool = False

    @property
    def early_bytes(self) -> int:
        """Memory of the parts that came early."""
        return sum(values.numel() * values.itemsize for values in self.early.values())

    def refusal(self, round: int, *, credits: int) -> Outcome | None:
        """Why a round with the peer cannot be, or None if it can."""
        if self.gone is not None:
            return Outcome.DEAD_PEER
        if round < self.latest or generation_of(round) > generation_of(self.latest):
            return Outcome.VOID  # the peer is past it, or has not come to this generation yet
        if round in self.voided or (self.known > self.over and round > self.settled_at):
            return Outcome.VOID
        if round <= self.given_up or round in self.cancelled:
            return Outcome.VOID
        others = {other for other, _ in self.open} - {round}
        return Outcome.VOID if len(others) >= credits else None

    def hear(self, generation: int, known: int) -> None:
        """A message came of a generation, whose sender knew of so many of our settlements."""
        if generation > self.era:
            self.known_before[self.era] = self.known
            self.era, self.known, self.over, self.heard = generation, 0, 0, 0
        if generation == self.era:
            self.heard = max(self.heard, known)

    def go_on(self, generation: int, number: int) -> None:
        """The peer goes on after so many collectives, heard of or not."""
        if generation == self.era:
            self.known = self.over = max(self.known, number)

    def knows(self, generation: int) -> int:
        """The number of the peer's last settlement in a generation that is known here."""
        return self.known if generation == self.era else self.known_before.get(generation, 0)

    def settle(self, generation: int, number: int, at: int) -> None:
        """The peer has come to a collective: what is open past its last round is void."""
        if generation != self.era:
            return
        if number > self.known:
            self.known, self.settled_at = number, at
        # One that was over before it was heard of spares what was sent since then.
        void = {key[0] for key, e in self.open.items() if key[0] > at and e.known < number}
        self.cancelled |= void
        self.resolve(lambda open_at: open_at in void, Outcome.VOID)

    def resume(self, generation: int, number: int, at: int) -> None:
        """The collective to which the peer came with its settlement `number` is over."""
        self.hear(generation, 0)
        if generation == self.era:
            self.settle(generation, number, at)
            self.over = max(self.over, number)

    def void_early(self, generation: int, *, past: int) -> None:
        """Voids the rounds of a generation past a place of which parts have come."""
        for round in {early for early, _ in self.early if early > past}:
            if generation_of(round) == generation:
                self.void(round)

    def void(self, round: int) -> None:
        """What the peer sends of a round is void, though it has not said so."""
        self.voided.add(round)
        self.resolve(lambda open_at: open_at == round, Outcome.VOID)
        self._drop(lambda other: other == round)

    def deliver(self, round: int, bucket: int, values: Tensor) -> bool:
        """Takes in the peer's part; False if it came too far ahead to be kept."""
        key = (round, bucket)
        exchange = self.open.pop(key, None)
        if exchange is not None:
            exchange.finish(Outcome.DELIVERED, values)
            return True
        if round <= self.given_up or round < self.past or round in self.cancelled:
            return True
        if len({early for early, _ in self.early} - {round}) >= _EARLY_ROUNDS:
            return False
        self.early[key] = values
        return True

    def move_on(self, generation: int, number: int, at: int, voided: set[int]) -> None:
        """The peer is at a place after so many collectives, and gave some rounds up on the way."""
        self.absent = False
        if at > self.settled_at:  # whatever became of the collective
            self.go_on(generation, number)
        self._pass(at)
        self.voided |= voided
        self.resolve(lambda open_at: open_at in voided, Outcome.VOID)

    def give_up(self, round: int) -> bool:
        """Voids a round before anything of it was sent; whether the peer is to be told at once.

        One that is silent for long is told of ever fewer: the last stands for those before it.
        """
        _discard(self.voided, round)
        self.given_up = round
        self._drop(lambda other: other <= round)
        self.silent_rounds += 1
        few = self.silent_rounds <= _NAMED_ROUNDS
        told = few or 4 * self.silent_rounds >= 5 * self.named_rounds
        if told:
            self.named_rounds = self.silent_rounds
        return told

    def catch_up(self, generation: int) -> int | None:
        """The round of a generation to name to the peer now, if it was not told of the last."""
        behind = self.named_rounds < self.silent_rounds
        self.named_rounds = self.silent_rounds = 0
        return self.given_up if behind and generation_of(self.given_up) == generation else None

    def take_early(self, key: Key, *, mutual: bool) -> Tensor | None:
        """The peer's part that came early; none of one that is gone, and gets no part in return."""
        values = self.early.pop(key, None)
        return None if mutual and self.gone is not None else values

    def cancel(self, exchange: Exchange) -> None:
        """Ends an open exchange; the peer's part is dropped should it come."""
        self.open.pop((exchange.at, exchange.bucket))
        self.cancelled.add(exchange.at)
        exchange.finish(Outcome.VOID)

    def cancel_all(self) -> None:
        """Ends all open exchanges."""
        for exchange in list(self.open.values()):
            self.cancel(exchange)

    def end(self, how: str, *, keep_early: bool) -> None:
        """The peer is gone; what it gave before it left may be taken where it gets nothing back."""
        self.gone = how
        self.resolve(lambda at: True, Outcome.DEAD_PEER)
        if not keep_early:
            self.early.clear()

    def resolve(self, which: Callable[[int], bool], outcome: Outcome) -> None:
        """Ends the open exchanges of some rounds."""
        for key in [key for key in self.open if which(key[0])]:
            self.open.pop(key).finish(outcome)

    def prune(self, before: int) -> None:
        """Forgets what no round from `before` on asks for."""
        self.past = max(self.past, before)
        self._drop(lambda round: round < before)
        _discard(self.voided, before)
        _discard(self.cancelled, before)

    def _pass(self, round: int) -> None:
        """What is open before `round` can come no more."""
        self.latest = max(self.latest, round)
        self.resolve(lambda earlier: earlier < round, Outcome.VOID)
        _discard(self.cancelled, round)

    def _drop(self, which: Callable[[int], bool]) -> None:
        for key in [key for key in self.early if which(key[0])]:
            del self.early[key]


def _discard(rounds: set[int], before: int) -> None:
    rounds.difference_update([round for round in rounds if round < before])
