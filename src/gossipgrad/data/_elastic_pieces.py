"""The pieces of an epoch that come to one rank: claimed ahead, while it trains on those before."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import AskedStore, Membership
from gossipgrad.errors import EvictedError

from ._elastic_claims import Claims, without
from ._elastic_deal import Deal, Piece
from ._elastic_record import View

logger = logging.getLogger(__name__)

_TELL_SECONDS = 0.5  # between two words of what was used: as often as ranks show signs of life
_FAREWELL_SECONDS = 1.0
_CONNECT_SECONDS = 10.0  # at least, for the first answer: as long as a session waits as it begins


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


class Tally:
    """Batches by epoch and share, as ranges.

    Attributes:
        parts: The ranges.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], list[range]] = {}

    def add(self, epoch: int, share: int, part: range) -> None:
        """Adds batches; those behind the last ones make one range with them."""
        parts = self.parts.setdefault((epoch, share), [])
        if parts and parts[-1].stop == part.start:
            parts[-1] = range(parts[-1].start, part.stop)
        else:
            parts.append(part)

    def forget(self, epoch: int) -> None:
        """Lets go of what is older than the epoch before."""
        for key in [key for key in self.parts if key[0] < epoch - 1]:
            del self.parts[key]

    def copy(self) -> dict[tuple[int, int], list[range]]:
        """The ranges as they are now."""
        return {key: [*parts] for key, parts in self.parts.items()}


class Pieces:
    """What one rank gets of an epoch, piece by piece.

    Args:
        deal: The shares, the same on all ranks.
        member: This rank.
        store: Where claims are kept.
        patience_seconds: How long a piece is awaited, the first one for ten seconds at least; no
            other is, until the store answers again.

    Attributes:
        claims: What is known of claims.
        untold: Pieces that were handed out without an answer of the store.
        exposed_seconds: Time spent waiting for it.
    """

    def __init__(
        self, deal: Deal, member: Member, store: dist.Store, *, patience_seconds: float
    ) -> None:
        self.claims = Claims(deal)
        self.untold: list[Piece] = []
        self.exposed_seconds = 0.0
        self._member = member
        self._patience_seconds = patience_seconds
        self._store = AskedStore(store)
        self._given, self._used = Tally(), Tally()
        self._spare: deque[Piece] = deque()
        self._asked: tuple[int, Future[Piece | None]] | None = None
        self._telling: Future[None] | None = None
        self._told_seconds = time.monotonic()
        self._lost = False
        self._limit_seconds = max(patience_seconds, _CONNECT_SECONDS)

    @property
    def living(self) -> tuple[int, ...]:
        """Who takes part."""
        return self._member.membership.living

    def begin(self, epoch: int, used: int) -> None:
        """An epoch begins, of which this rank has used so many batches of its share before."""
        for tally in (self._given, self._used):
            tally.forget(epoch)
            if used:
                tally.add(epoch, self._member.rank, range(used))

    def of(self, epoch: int) -> Iterator[Piece]:
        """The pieces of an epoch, and what is left of earlier ones; the next one is claimed ahead.

        Raises:
            EvictedError: This rank is none of the living.
        """
        while (piece := self._next(epoch)) is not None:
            self._given.add(piece.epoch, piece.share, piece.batches)
            self._ask(epoch)
            yield piece

    def newest_epoch(self) -> int | None:
        """The newest that any rank has begun, None if there is none or the store is silent."""
        try:
            newest = self._store.begin(self.claims.newest).result(self._patience_seconds)
        except (TimeoutError, RuntimeError):
            return None
        return None if newest < 0 else newest

    def use(self, piece: Piece) -> None:
        """Notes that a piece, or a part of one, was trained on; tells so now and then."""
        self._used.add(piece.epoch, piece.share, piece.batches)
        if time.monotonic() - self._told_seconds >= _TELL_SECONDS:
            self._tell()

    def end(self, epoch: int) -> None:
        """This rank is done with an epoch, at the end of its pieces or before."""
        if self._member.rank not in self.living:
            return
        view = self._view()
        if self.claims.guess(view, epoch, self._given.parts) is None:
            self.claims.ended[epoch] = view.living
        self._tell()

    def close(self) -> list[Piece]:
        """Tells what was used; what ranks that are gone have left of the last epochs."""
        if self._member.rank not in self.living:
            self._store.close()
            return []
        view, used = self._view(), self._used.copy()

        def tell(store: dist.Store) -> list[Piece]:
            self.claims.tell(store, view, used)
            return self.claims.left(store, view, used)

        try:
            return self._store.begin(tell).result(_FAREWELL_SECONDS)
        except (TimeoutError, RuntimeError):
            return []  # others do not know it then, as of a rank that dies
        finally:
            self._store.close()

    def _next(self, epoch: int) -> Piece | None:
        while not self._spare:
            self._ask(epoch)
            assert self._asked is not None
            of_epoch, asked = self._asked
            start_seconds = time.perf_counter()
            try:
                piece = asked.result(0.0 if self._lost else self._limit_seconds)
            except TimeoutError:
                return self._guess(epoch, f"did not answer within {self._limit_seconds:g} s")
            except RuntimeError as error:
                self._asked = None
                return self._guess(epoch, f"is lost ({first_line(error)})")
            finally:
                self.exposed_seconds += time.perf_counter() - start_seconds
            self._asked, self._lost = None, False
            self._limit_seconds = self._patience_seconds
            if piece is not None:
                # It may have been given meanwhile, when the store was silent.
                given = self._given.parts.get((piece.epoch, piece.share), [])
                for part in without(piece.batches, given):
                    self._spare.append(piece._replace(start=part.start, stop=part.stop))
            elif of_epoch == epoch:
                return None
        return self._spare.popleft()

    def _ask(self, epoch: int) -> None:
        if self._asked is None:
            view, used = self._view(), self._used.copy()
            take = self.claims.take
            future = self._store.begin(lambda store: take(store, view, epoch, used))
            self._asked, self._told_seconds = (epoch, future), time.monotonic()

    def _tell(self) -> None:
        """Has the store told what was used, unless it is silent or nobody would believe it."""
        asked = self._telling is not None and not self._telling.done()
        if asked or self._member.rank not in self.living:
            return
        tell, view, used = self.claims.tell, self._view(), self._used.copy()
        self._telling = self._store.begin(lambda store: tell(store, view, used))
        self._told_seconds = time.monotonic()

    def _guess(self, epoch: int, why: str) -> Piece | None:
        """What to go on with while the store is silent."""
        if not self._lost:
            self._lost = True
            logger.warning(
                "rank %d: the rendezvous store %s; samples are dealt without it, and where ranks "
                "come or go meanwhile, some may be used twice or not at all",
                self._member.rank,
                why,
                extra={"store_silent": why},
            )
        piece = self.claims.guess(self._view(), epoch, self._given.parts)
        if piece is not None:
            self.untold.append(piece)
        return piece

    def _view(self) -> View:
        rank, membership = self._member.rank, self._member.membership
        if rank not in membership.living:
            raise EvictedError(
                f"rank {rank} is none of the living ({', '.join(map(str, membership.living))}) in "
                f"generation {membership.generation}: no samples are dealt to it"
            )
        return View(rank=rank, generation=membership.generation, living=membership.living)
