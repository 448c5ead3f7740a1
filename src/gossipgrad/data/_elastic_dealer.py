"""One rank's hands of batches: dealt by a thread through the store, drawn without waiting."""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import Membership, StoreThread
from gossipgrad.errors import EvictedError

from ._elastic_deal import Deal, Piece, part_of, size_of

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.1  # between two looks at the membership
_REPORT_SECONDS = 0.5  # between two reports at most: as often as ranks show signs of life
_CONNECT_SECONDS = 10.0  # at least, for the first answer: as long as a session waits as it begins
_FAREWELL_SECONDS = 1.0
_RETRY_SECONDS = 0.5  # after an error of the store
_REMEMBERED_EPOCHS = 2  # before the present one, of which dead ranks may have left something
_KEPT_EPOCHS = 8  # in the store, for ranks that lag behind
_NEWEST = "newest"


@runtime_checkable
class Member(Protocol):
    """A rank of a run whose ranks come and go; a `GossipSession` is one."""

    @property
    def rank(self) -> int:
        """Its number, which no other rank has had or will have."""
        ...

    @property
    def membership(self) -> Membership:
        """The generation that it takes part in; `generation` and `living` are read."""
        ...


class Drawn(NamedTuple):
    """A batch that was drawn, and its number among all that this rank has had of its epoch."""

    epoch: int
    generation: int
    number: int
    share: int
    batch: int


@dataclass(slots=True)
class _Epoch:
    """This rank's part of one epoch; numbers count from the first batch that it ever had."""

    text: str = ""
    """The deal as the store had it last."""
    generation: int = -1
    """Of the hand; -1 while there is no deal."""
    hand: list[tuple[int, int]] = field(default_factory=list)
    """Shares and batches, from number `base` on."""
    base: int = 0
    kept: int = 0
    """Up to which number the hand is that of the deal before."""
    drawn: int = 0
    """How far batches were drawn ..."""
    taken: int = 0
    """... or skipped."""
    used: int = 0
    """Trained on so far."""
    reported: int = 0
    """Of these, what was reported to the store."""
    done: float = 0.0
    """Share of the epoch that all together had done when the hand was dealt."""

    @property
    def end(self) -> int:
        """Behind the last batch of the hand."""
        return self.base + len(self.hand)


class Dealer:
    """Draws the batches of one rank, and deals them anew when ranks come or go.

    One thread does all that asks the store. It reports what was used, and when the membership is
    of a new generation it makes the next deal of the present epochs, by compare-and-set: the first
    rank that does so decides it for all. Drawing waits for the thread in three cases: for the first
    deal of an epoch; at the end of a hand, for a deal that is under way; and for a report, where a
    whole chunk was used since the one before.

    Args:
        member: This rank.
        store: With a prefix of its own; asked through a clone.
        shares: Of an epoch, as many as ranks at the start.
        batches: Of a share.
        chunk: Batches that may be used without a report.
        patience_seconds: How long drawing waits for the store; once, until it answers again.

    Attributes:
        repeated: Pieces that may be trained on twice: what dead ranks may have begun, of deals that
            this rank has made, and what it had drawn itself of batches that it gave away.
        untold: Batches drawn while the store was silent.
        left: After `close`: what nobody has trained on, or has reported, of the last ones.
        disturbed: Epochs in which others than the ranks of the start take part, or did.
        requests: To the store, so far.
        exposed_seconds: Time that drawing waited.
    """

    def __init__(
        self,
        member: Member,
        store: dist.Store,
        *,
        shares: int,
        batches: int,
        chunk: int,
        patience_seconds: float,
    ) -> None:
        self.repeated: list[Piece] = []
        self.untold: list[Drawn] = []
        self.left: list[Piece] = []
        self.disturbed: set[int] = set()
        self.requests = 0
        self.exposed_seconds = 0.0
        self._member, self._chunk = member, chunk
        self._connect = store.clone  # pyrefly: ignore
        self._shares, self._batches = shares, batches
        self._patience_seconds = patience_seconds
        self._limit_seconds = max(patience_seconds, _CONNECT_SECONDS)
        self._epochs: dict[int, _Epoch] = {}
        self._current = self._newest = -1
        self._asks_newest = self._leaves = self._silent = False
        self._error: ValueError | None = None
        self._report_seconds = self._ticked_seconds = 0.0
        self._changed = threading.Condition()  # guards all of the above
        self._kick = threading.Event()
        self._over = threading.Event()
        self._thread = StoreThread(self._run, self.end_thread, name="gossipgrad-shares")

    # What training calls.

    def begin(self, epoch: int, used: int) -> None:
        """An epoch begins, of which this rank has used so many batches of its share before."""
        with self._changed:
            self._current = epoch
            state = self._epochs.setdefault(epoch, _Epoch())
            if state.generation < 0:
                state.taken = state.used = used
            for past in [e for e in self._epochs if e < epoch - _REMEMBERED_EPOCHS]:
                del self._epochs[past]
            self._start()

    def draw(self, epoch: int) -> Drawn | None:
        """The next batch: of what this rank has been dealt of epochs before, then of this one.

        Raises:
            EvictedError: This rank is none of the living.
            ValueError: Somebody keeps something else under the same name in the store.
        """
        with self._changed:
            state = self._epochs[epoch]
            while True:
                self._check()
                if (drawn := self._next(epoch)) is not None:
                    return drawn
                if self._is_settled(state):
                    return None
                if not self._wait(self._limit_seconds, lambda: self._can_go_on(epoch)):
                    if state.generation >= 0:
                        return None
                    self._install(epoch, state, self._first())

    def use(self, drawn: Drawn) -> None:
        """Notes that a batch was trained on; waits for a report where one more makes a chunk."""
        with self._changed:
            state = self._epochs.get(drawn.epoch)
            # Else it was given away before it was used.
            if state and (drawn.generation == state.generation or drawn.number < state.kept):
                state.used = max(state.used, drawn.number + 1)
            if self._unreported >= max(1, self._chunk // 2):
                self._kick.set()
            if self._unreported >= self._chunk:
                self._wait(self._patience_seconds, lambda: self._unreported < self._chunk)

    def end(self, epoch: int) -> None:
        """This rank draws no more of an epoch; what it has not drawn, it skips."""
        with self._changed:
            if (state := self._epochs.get(epoch)) is not None:
                state.taken = max(state.taken, state.end)
        self._kick.set()

    def newest_epoch(self) -> int | None:
        """The newest that any rank has begun; None if there is none or the store is silent."""
        with self._changed:
            self._start()
            self._asks_newest = True
            found = self._wait(self._patience_seconds, lambda: not self._asks_newest)
            return self._newest if found and self._newest >= 0 else None

    def progress(self, epoch: int) -> float | None:
        """The share of an epoch that is done, as far as is known; None if nobody came or went."""
        with self._changed:
            state = self._epochs.get(epoch)
            if state is None or not state.hand or epoch not in self.disturbed:
                return None
            own = (min(state.taken, state.end) - state.base) / len(state.hand)
            return state.done + (1 - state.done) * own

    def close(self) -> None:
        """Reports what was used, and leaves; waits for the store for a second."""
        self._leaves = True
        self._kick.set()
        if self._thread.ident is not None:
            self._thread.join(_FAREWELL_SECONDS)
        self.end_thread()

    def end_thread(self) -> None:
        """Nothing is reported or dealt by this rank from now on; returns at once."""
        self._over.set()
        self._kick.set()

    def is_disturbed(self, epoch: int) -> bool:
        """Whether others than the ranks of the start take part in an epoch, or did."""
        now = self._member.membership.living != tuple(range(self._shares))
        return now or epoch in self.disturbed

    # Behind that, with the lock.

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        rank, membership = self._member.rank, self._member.membership
        if rank not in membership.living:
            raise EvictedError(
                f"rank {rank} is none of the living ({', '.join(map(str, membership.living))}) in "
                f"generation {membership.generation}: no samples are dealt to it"
            )

    def _next(self, epoch: int) -> Drawn | None:
        for of, state in sorted(self._epochs.items()):
            if of <= epoch and state.taken < state.end:
                share, batch = state.hand[state.taken - state.base]
                drawn = Drawn(of, state.generation, state.taken, share, batch)
                state.drawn = state.taken = state.taken + 1
                if self._silent:
                    self.untold.append(drawn)
                return drawn
        return None

    def _is_settled(self, state: _Epoch) -> bool:
        return 0 <= state.generation >= self._member.membership.generation

    def _can_go_on(self, epoch: int) -> bool:
        states = [state for of, state in sorted(self._epochs.items()) if of <= epoch]
        return (
            self._error is not None
            or self._member.rank not in self._member.membership.living
            or any(state.taken < state.end for state in states)
            or self._is_settled(states[-1])
        )

    def _wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Waits for the thread; once in vain, not again until the store has answered."""
        self._kick.set()
        start, start_seconds = time.perf_counter(), time.monotonic()
        done = self._changed.wait_for(until, 0.0 if self._silent else seconds)
        self.exposed_seconds += time.perf_counter() - start
        if not done and self._ticked_seconds < start_seconds:
            self._lose(f"did not answer within {seconds:g} s")
        return done

    def _lose(self, why: str) -> None:
        if not self._silent:
            self._silent = True
            logger.warning(
                "rank %d: the rendezvous store %s; samples are dealt without it, and where ranks "
                "come or go meanwhile, some may be used twice or not at all",
                self._member.rank,
                why,
                extra={"store_silent": why},
            )

    @property
    def _unreported(self) -> int:
        return sum(state.used - state.reported for state in self._epochs.values())

    def _first(self) -> Deal:
        view = self._member.membership
        return Deal.first(view.generation, view.living, shares=self._shares, batches=self._batches)

    def _install(self, epoch: int, state: _Epoch, deal: Deal) -> None:
        """Takes the hand of a newer deal; what was drawn and used stays so."""
        if deal.generation <= state.generation:
            return
        begun = deal.begun.get(self._member.rank, 0)
        before = state.hand[begun - state.base :]
        state.base = begun
        state.hand = [
            (piece.share, batch)
            for piece in deal.hands.get(self._member.rank, ())
            for batch in range(piece.start, piece.stop)
        ]
        pairs = enumerate(zip(before, state.hand, strict=False))
        same = next((n for n, (one, two) in pairs if one != two), min(len(before), len(state.hand)))
        state.kept = state.base + same
        if state.generation >= 0 and state.kept < min(state.taken, state.base + len(before)):
            # Drawn, or skipped, before this rank had heard that others have it now.
            given = before[same : max(state.drawn - state.base, 0)]
            self.repeated += [Piece(share, one, one + 1) for share, one in given]
            state.drawn, state.taken = min(state.drawn, state.kept), state.kept
            state.used = min(state.used, state.kept)
            state.reported = min(state.reported, state.kept)
        state.generation = deal.generation
        left = sum(map(size_of, deal.hands.values()))
        state.done = 1 - left / (self._shares * self._batches)
        if tuple(deal.hands) != tuple(range(self._shares)):
            self.disturbed.add(epoch)
        self._changed.notify_all()

    # What the thread does.

    def _run(self) -> None:
        store: dist.Store | None = None
        while not self._over.is_set():
            self._kick.wait(_TICK_SECONDS)
            self._kick.clear()
            leaves = self._leaves
            try:
                store = self._connect() if store is None else store
                self._tick(store, leaves=leaves)
            except ValueError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            except RuntimeError as error:  # the store's
                store = None
                with self._changed:
                    self._lose(f"is lost ({first_line(error)})")
                    self._changed.notify_all()
                self._over.wait(_RETRY_SECONDS)
            else:
                with self._changed:
                    self._silent, self._limit_seconds = False, self._patience_seconds
                    self._ticked_seconds = time.monotonic()
                    self._changed.notify_all()
            if leaves:
                return

    def _tick(self, store: dist.Store, *, leaves: bool) -> None:
        view = self._member.membership
        if self._member.rank not in view.living:
            return
        if self._asks_newest:
            newest = int(self._change(store, _NEWEST, "", "") or -1)
            with self._changed:
                self._newest, self._asks_newest = newest, False
        with self._changed:
            epochs = sorted(self._epochs.items())
        for epoch, state in epochs:
            if state.generation < 0:
                self._open(store, epoch, state)
            if state.generation < view.generation and not leaves:
                self._deal(store, epoch, state, view)
        deals = {}
        if leaves:  # what it had given away without hearing of it counts, too
            for epoch, state in epochs:
                text = self._change(store, f"deal/{epoch}", "", "") or state.text
                deals[epoch] = Deal.parse(text)
                with self._changed:
                    self._install(epoch, state, deals[epoch])
        self._report(store, epochs, leaves=leaves)
        for epoch, deal in deals.items():
            if self.is_disturbed(epoch):
                used, have_left = self._used(store, epoch, deal, deal.hands)
                for rank in {*deal.hands} - {*view.living} | have_left:
                    hand = deal.hands[rank]
                    self.left += part_of(hand, used[rank], size_of(hand))

    def _open(self, store: dist.Store, epoch: int, state: _Epoch) -> None:
        """Reads the first deal of an epoch, or makes it."""
        mine = self._first().text()
        text = self._change(store, f"deal/{epoch}", "", mine)
        deal = Deal.parse(text)
        with self._changed:
            state.text = text
            self._install(epoch, state, deal)
        newest = self._change(store, _NEWEST, "", str(epoch))
        while int(newest) < epoch:
            newest = self._change(store, _NEWEST, newest, str(epoch))
        if text == mine and epoch >= _KEPT_EPOCHS:
            self.requests += 1
            store.delete_key(f"deal/{epoch - _KEPT_EPOCHS}")

    def _deal(self, store: dist.Store, epoch: int, state: _Epoch, view: Membership) -> None:
        """Makes the deal of a generation, or takes the one that another rank has made."""
        key = f"deal/{epoch}"
        text = self._change(store, key, "", "") or state.text  # another may have made it already
        while True:
            deal = Deal.parse(text)
            repeated: list[Piece] = []
            wanted, before = "", ""
            if deal.generation < view.generation:
                used, left = self._used(store, epoch, deal, deal.hands)
                gone = {*deal.hands} - {*view.living} - left
                repeated = [
                    piece
                    for rank in gone
                    for piece in part_of(deal.hands[rank], used[rank], used[rank] + self._chunk)
                ]
                deal = deal.next(
                    view.generation,
                    view.living,
                    used,
                    least=2 * self._chunk,
                    by=self._member.rank,
                )
                before, wanted = text, deal.text()
                text = self._change(store, key, before, wanted)
            if text in ("", before):  # an epoch so long past that the store has it no more
                with self._changed:
                    state.generation = view.generation
                return
            if wanted in ("", text):
                with self._changed:
                    state.text = text
                    self.repeated += repeated
                    self._install(epoch, state, deal)
                return

    def _used(
        self, store: dist.Store, epoch: int, deal: Deal, ranks: Collection[int]
    ) -> tuple[dict[int, int], set[int]]:
        """What ranks have reported of their hands, and who has left."""
        used, left = {}, set()
        for rank in ranks:
            report = json.loads(self._change(store, f"used/{rank}", "", "") or "{}")
            used[rank] = deal.used(rank, *report.get(str(epoch), (-2, 0)))
            if "left" in report:
                left.add(rank)
        return used, left

    def _report(self, store: dist.Store, epochs: list[tuple[int, _Epoch]], *, leaves: bool) -> None:
        with self._changed:
            now, unreported = time.monotonic(), self._unreported
            is_due = now - self._report_seconds >= _REPORT_SECONDS and unreported
            if not (is_due or leaves or unreported >= max(1, self._chunk // 2)):
                return
            report = {epoch: (s.generation, s.used) for epoch, s in epochs}
            used = [(state, state.used) for _, state in epochs]
        self.requests += 1
        farewell = {"left": True} if leaves else {}
        store.set(f"used/{self._member.rank}", json.dumps({**report, **farewell}))
        with self._changed:
            self._report_seconds = now
            for state, count in used:
                state.reported = min(count, state.used)
            self._changed.notify_all()

    def _change(self, store: dist.Store, key: str, before: str, after: str) -> str:
        """What the store has under a key after a change from `before`; "" and "" only read."""
        self.requests += 1
        return store.compare_set(key, before, after).decode()
