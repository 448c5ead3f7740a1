"""Claims of batches in a store: who trains on which of them is decided there, once."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ._elastic_deal import Deal, Piece
from ._elastic_record import Span, View, begun, claimed, free_parts, parse, to_text, told

# By epoch and share: batches of this rank.
Parts = Mapping[tuple[int, int], Sequence[range]]

_NEWEST = "newest"
_FRESH_SECONDS = 0.5  # what was read of other ranks' claims counts as known for so long
_REMEMBERED_EPOCHS = 2  # that ranks who are gone may have left something of
_KEPT_EPOCHS = 8  # in the store, for ranks that lag behind


@runtime_checkable
class ClaimStore(Protocol):
    """What is asked of the store: any of torch's."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Writes if what is there is as expected; returns what is there then."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Forgets a key."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """How far an epoch was, as one rank saw it.

    Attributes:
        others: Batches that other ranks had told of.
        own: Batches of this rank.
        living: How many ranks took part.
    """

    others: int
    own: int
    living: int


@dataclass(slots=True)
class _Epoch:
    """What is known of one epoch."""

    texts: dict[int, str] = field(default_factory=dict)
    """Of each share, what the store held when it was asked last."""
    generation: int = -1
    queue: deque[Piece] = field(default_factory=deque)
    """What is dealt to this rank in this generation, and not claimed."""
    surveyed_seconds: float | None = None


class Claims:
    """Claims batches for one rank, and tells which of them it has trained on.

    What talks to the store is called by one thread. All is written by compare-and-set, one key a
    share of an epoch: of two ranks that claim the same batches one wins, and the other reads it.

    Args:
        deal: The shares of an epoch, and whose they are.
        now: The clock.

    Attributes:
        requests: To the store, so far.
        disturbed: Epochs in which others than the ranks of the start take part, or did.
        begun: Batches that this rank took over from ranks that are gone, which had claimed them and
            may have trained on them without telling.
        done: By epoch, how far it was when that was last read.
        ended: By epoch that this rank came to the end of, who lived then; some may have left some
            of it. Set from outside.
    """

    def __init__(self, deal: Deal, *, now: Callable[[], float] = time.monotonic) -> None:
        self.requests = 0
        self.disturbed: set[int] = set()
        self.begun: list[Piece] = []
        self.done: dict[int, Done] = {}
        self.ended: dict[int, tuple[int, ...]] = {}
        self._deal = deal
        self._now = now
        self._first = tuple(range(deal.shares))
        self._epochs: dict[int, _Epoch] = {}
        self._arrears: deque[Piece] = deque()
        self._generation = -1
        self._newest = -1  # epoch that is known to have begun

    def take(self, store: ClaimStore, view: View, epoch: int, used: Parts) -> Piece | None:
        """Claims what comes next for this rank, None if nothing is left; tells what it has used.

        First what ranks that are gone have left of earlier epochs; then what is dealt to this rank;
        and where ranks came or went, at last what nobody has claimed.
        """
        if epoch not in self._epochs:
            self._begin(store, view, epoch)
        state = self._epochs.setdefault(epoch, _Epoch())
        if view.living != self._first:
            self.disturbed.add(epoch)
        if view.generation > self._generation:
            self._generation = view.generation
            self._look_back(store, view, used)
        news = view.generation > state.generation
        if news:
            state.generation = view.generation
            state.queue = deque(self._deal.hand(epoch, view.rank, view.living))
        if epoch in self.disturbed and (news or not self._is_fresh(state)):
            self._survey(store, view, epoch, used)
        piece = self._next(store, view, epoch, used)
        self.tell(store, view, used)
        return piece

    def newest(self, store: ClaimStore) -> int:
        """The newest epoch that any rank has begun, -1 if there is none."""
        self.requests += 1
        return int(store.compare_set(_NEWEST, "", "").decode() or -1)

    def tell(self, store: ClaimStore, view: View, used: Parts) -> None:
        """Writes what this rank has trained on, as far as that is news."""
        for epoch, share in used:
            self._write(store, view, epoch, share, used)

    def left(self, store: ClaimStore, view: View, used: Parts) -> list[Piece]:
        """What ranks that are gone have left of the last epochs, and nobody has trained on."""
        self._look_back(store, view, used)
        return [
            piece._replace(start=free.start, stop=free.stop)
            for piece in self._arrears
            for free in free_parts(self._spans(piece), piece.batches, view)
        ]

    def guess(self, view: View, epoch: int, handed: Parts) -> Piece | None:
        """What comes next by all that is known; asks nobody, for when the store is silent.

        Args:
            view: The membership.
            epoch: The epoch.
            handed: What this rank has been given already.
        """
        for piece in self._deal.hand(epoch, view.rank, view.living):
            others = [span for span in self._spans(piece) if span.rank != view.rank]
            for part in free_parts(others, piece.batches, view):
                for free in without(part, handed.get((epoch, piece.share), ())):
                    return piece._replace(start=free.start, stop=free.stop)
        return None

    def _is_past(self, epoch: int) -> bool:
        """Whether the store may have let go of an epoch: what it says of it counts no more.

        Of one in which ranks came or went, others have taken by then what nobody had claimed.
        """
        return epoch + _KEPT_EPOCHS <= self._newest

    def _next(self, store: ClaimStore, view: View, epoch: int, used: Parts) -> Piece | None:
        for queue in (self._arrears, self._epochs[epoch].queue):
            while queue:
                piece = queue.popleft()
                part = self._write(store, view, piece.epoch, piece.share, used, piece.batches)
                if part is None:
                    continue
                if part.stop < piece.stop:
                    queue.appendleft(piece._replace(start=part.stop))
                return piece._replace(start=part.start, stop=part.stop)
        return self._search(store, view, epoch, used) if epoch in self.disturbed else None

    def _search(self, store: ClaimStore, view: View, epoch: int, used: Parts) -> Piece | None:
        """Claims of what nobody has: ever less at a time, so that all come to the end together."""
        deal, living = self._deal, len(view.living)
        surveyed = False
        while not self._is_past(epoch):
            free = [
                Piece(epoch, share, part.start, part.stop)
                for share in range(deal.shares)
                for part in free_parts(self._known(epoch, share), range(deal.batches), view)
            ]
            if not free:
                if surveyed:
                    return None
                self._survey(store, view, epoch, used)
                surveyed = True
                continue
            batches = sum(len(piece.batches) for piece in free)
            piece = free[view.living.index(view.rank) * len(free) // living]
            # From the end of it: at its beginning may be whom it is dealt to.
            size = max(1, min(deal.chunk, batches // (2 * living)))
            wanted = range(max(piece.start, piece.stop - size), piece.stop)
            part = self._write(store, view, epoch, piece.share, used, wanted)
            if part is not None:
                return piece._replace(start=part.start, stop=part.stop)
        return None

    def _look_back(self, store: ClaimStore, view: View, used: Parts) -> None:
        """Looks up what those who are gone since have left of the epochs before."""
        if view.generation == 0:
            return  # nobody has gone
        waiting = {*self._arrears}
        for epoch, ended in [*self.ended.items()]:
            self._survey(store, view, epoch, used)
            if self._is_past(epoch):
                self.ended.pop(epoch)
                continue
            shares = range(self._deal.shares)
            # Those, too, that joined and have gone without this rank's hearing of them.
            claimants = {span.rank for share in shares for span in self._known(epoch, share)}
            gone = {*ended, *claimants} - {*view.living}
            left = [
                Piece(epoch, share, batch, batch + 1)
                for share in shares
                for batch in self._left_by(gone, view, epoch, share, ended)
            ]
            self._arrears.extend(piece for piece in left if piece not in waiting)
            self.ended[epoch] = view.living
        # Each begins elsewhere, or all would claim the same.
        self._arrears.rotate(
            -(view.living.index(view.rank) * len(self._arrears) // len(view.living))
        )

    def _left_by(
        self, gone: set[int], view: View, epoch: int, share: int, ended: tuple[int, ...]
    ) -> list[int]:
        """Batches of a share that were claimed by those who are gone, or dealt to them."""
        spans = self._known(epoch, share)
        theirs = [span for span in spans if span.rank in gone]
        return [
            batch
            for part in free_parts(spans, range(self._deal.batches), view)
            for batch in part
            if self._deal.owner(share, batch, ended) in gone
            or any(span.start <= batch < span.end for span in theirs)
        ]

    def _survey(self, store: ClaimStore, view: View, epoch: int, used: Parts) -> None:
        """Reads all claims of an epoch, unless the store may have let go of them."""
        if self._is_past(epoch):
            return
        texts = {}
        for share in range(self._deal.shares):
            self.requests += 1
            texts[share] = store.compare_set(self._key(epoch, share), "", "").decode()
        # Asked behind them: what is let go of after that was read in time.
        self._newest = max(self._newest, self.newest(store))
        if self._is_past(epoch):
            return
        state = self._epochs.setdefault(epoch, _Epoch())
        state.texts = texts
        spans = [span for share in texts for span in self._known(epoch, share)]
        others = sum(span.used for span in spans if span.rank != view.rank)
        state.surveyed_seconds = self._now()
        own = sum(len(part) for (e, _), parts in used.items() if e == epoch for part in parts)
        self.done[epoch] = Done(others=others, own=own, living=len(view.living))

    def _is_fresh(self, state: _Epoch) -> bool:
        at = state.surveyed_seconds
        return at is not None and self._now() - at <= _FRESH_SECONDS

    def _write(
        self,
        store: ClaimStore,
        view: View,
        epoch: int,
        share: int,
        used: Parts,
        wanted: range = range(0),
    ) -> range | None:
        """Tells what was used of a share, and claims the first free part of what is wanted."""
        texts = self._epochs.setdefault(epoch, _Epoch()).texts
        while True:
            before = texts.get(share, "")
            spans = told(parse(before), used.get((epoch, share), ()), view)
            if any(span.rank != share for span in spans):
                self.disturbed.add(epoch)
            part = next(iter(free_parts(spans, wanted, view)), None)
            over = [] if part is None else begun(spans, part, view)
            after = to_text(spans if part is None else claimed(spans, part, view))
            if after == to_text(parse(before)):
                return None
            if self._is_past(epoch):
                if epoch in self.disturbed or share != view.rank:
                    return None
                texts[share] = after  # its own share, which nobody else takes of
                return part
            self.requests += 1
            texts[share] = store.compare_set(self._key(epoch, share), before, after).decode()
            if texts[share] == after:
                self.begun += [Piece(epoch, share, one.start, one.stop) for one in over]
                return part
            if texts[share] == before:  # what torch's stores say of a key that is gone
                self._newest = max(self._newest, epoch + _KEPT_EPOCHS)
            # Else another rank was faster.

    def _begin(self, store: ClaimStore, view: View, epoch: int) -> None:
        """Says that an epoch has begun; lets go of those long past, here and in the store."""
        before, begun = "", -1
        while begun < epoch:
            self.requests += 1
            told = store.compare_set(_NEWEST, before, str(epoch)).decode()
            before, begun = told, int(told or -1)
        self._newest = max(self._newest, begun)
        for past in [e for e in self._epochs if e < epoch - _REMEMBERED_EPOCHS]:
            del self._epochs[past]
            self.done.pop(past, None)
            self.ended.pop(past, None)
        if (past := epoch - _KEPT_EPOCHS) >= 0:
            place, ranks = view.living.index(view.rank), len(view.living)
            for share in range(place, self._deal.shares, ranks):  # each rank its part of them
                self.requests += 1
                store.delete_key(self._key(past, share))

    def _known(self, epoch: int, share: int) -> list[Span]:
        state = self._epochs.get(epoch)
        return [] if state is None else parse(state.texts.get(share, ""))

    def _spans(self, piece: Piece) -> list[Span]:
        return self._known(piece.epoch, piece.share)

    @staticmethod
    def _key(epoch: int, share: int) -> str:
        return f"{epoch}/{share}"


def without(part: range, parts: Sequence[range]) -> list[range]:
    """What is left of a part, less others.

    Example:
        >>> without(range(9), [range(2, 4), range(6, 12)])
        [range(0, 2), range(4, 6)]
    """
    left = [part]
    for other in parts:
        left = [
            rest
            for one in left
            for rest in (
                range(one.start, min(one.stop, max(one.start, other.start))),
                range(max(one.start, min(one.stop, other.stop)), one.stop),
            )
            if rest
        ]
    return left
