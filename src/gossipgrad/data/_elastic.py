"""Batches of samples that are dealt again when ranks join or leave."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from gossipgrad._messages import first_line
from gossipgrad.comm import AskedStore, Membership, StoreSilentError
from gossipgrad.errors import EvictedError

from ._dataset import Samples
from ._deal import Deal, Runs, extend
from ._shards import check_whole, epoch_order, made_ahead, num_batches

logger = logging.getLogger(__name__)

_CHUNKS = 16  # of a share, about, ...
_LEAST_CHUNK, _MOST_CHUNK = 4, 32  # ... of so many batches
_ORDERS = 2  # are kept: that of this epoch, and that of one which something was left of
_REPORT_SECONDS = 0.5  # between two reports at most
_CONNECT_SECONDS = 10.0  # at least, for the first answer: as long as a session waits as it begins
_TRY_SECONDS = 0.05  # for an answer of a store that was silent before
_FAREWELL_SECONDS = 1.0
_REMEMBERED_EPOCHS = 2  # before the present one, of which dead ranks may have left something
_NEWEST = "newest"

Batch = tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticStats:
    """What one rank's `ElasticBatches` have done so far; no communication.

    Attributes:
        samples: That this rank was given.
        samples_dealt_anew: Of these, those of the share of another rank.
        samples_used_twice_at_most: That may be trained on twice: of each dead rank whose batches
            this one dealt anew, a chunk; and what this rank had begun of batches that it gave away.
        samples_untold: That this rank was given while the store did not answer: another may have
            been given them, too.
        samples_left: Of the last epochs, if ranks came or went, what nobody is known to have
            trained on; known after `close()`, best by the rank that closes last.
        disturbed_epochs: In which ranks came or went, or had come or gone before.
        store_requests: Asked of the store, in the background.
        exposed_seconds: Time that batches waited for the store.
    """

    samples: int = 0
    samples_dealt_anew: int = 0
    samples_used_twice_at_most: int = 0
    samples_untold: int = 0
    samples_left: int = 0
    disturbed_epochs: int = 0
    store_requests: int = 0
    exposed_seconds: float = 0.0


class ElasticBatches:
    """Batches of an epoch that all ranks share, also when ranks join or leave.

    For as long as those ranks live that began, they are those of `ShardedBatches`, bit for bit.
    When a rank is lost, leaves or joins, the rest of the epoch is dealt again among the living
    ranks, from the data set that each of them can read: over an epoch every sample that
    `ShardedBatches` deals is given to a rank.

    The new deal follows from the generation of the membership and from what ranks have reported;
    the first rank that makes it, in the rendezvous store, decides it for all, and nobody waits. A
    rank reports what it has trained on in the background, at least every half chunk. Of a dead rank
    at most one chunk is unknown, and used twice. A rank gives away the end of its part alone; what
    it had trained on there before it heard is used twice as well (`samples_used_twice_at_most` has
    both). What is known to be left of an epoch only after its end is trained on in the next, or in
    the one after that.

    When the store does not answer, batches wait for it for `patience_seconds`, once; then ranks go
    on with what they have been dealt, and new deals are made when it answers. What ranks that came
    or went meanwhile had to do with may then be used twice, or not at all.

    Ranks make unequal numbers of batches in an epoch once any came or went. Go
    through each epoch once, in rising order; rates should go by `position`.

    Args:
        samples: The training part, the same on all ranks.
        batch_size: Samples of a batch, the same on all ranks.
        member: This rank's session, from `gossipgrad.gossip` or `gossipgrad.join`.
        store: The rendezvous store, with the same prefix on all ranks: `session.group.store`.
        world_size: How many ranks took part at the start, also for one that joined.
        seed: Decides the order; the same on all ranks.
        threads: How many make batches ahead; worth it where samples are decoded.
        chunk_batches: Batches that a rank trains on at most before the others know, the same on all
            ranks; None: a sixteenth of a share, but 4 to 32.
        patience_seconds: How long a batch waits for the store; the first of all, which needs a
            connection, for ten seconds at least.
        name: Of these batches in the store; others of the same run need another.

    Raises:
        ValueError: A number is too small, or there are fewer samples than ranks.

    Example:
        >>> import torch.distributed as dist
        >>> from types import SimpleNamespace
        >>> from gossipgrad.comm import Membership
        >>> from gossipgrad.data import TensorSamples
        >>> samples = TensorSamples(torch.arange(8.0), torch.arange(8))
        >>> store, both = dist.HashStore(), Membership(generation=0, living=(0, 1))
        >>> ranks = [SimpleNamespace(rank=rank, membership=both) for rank in range(2)]
        >>> first, second = [
        ...     ElasticBatches(
        ...         samples=samples,
        ...         batch_size=1,
        ...         member=rank,
        ...         store=store,
        ...         world_size=2,
        ...         seed=0,
        ...         chunk_batches=1,
        ...     )
        ...     for rank in ranks
        ... ]
        >>> batches = second.epoch(0)
        >>> next(batches)[1].tolist()
        [4]
        >>> ranks[0].membership = Membership(generation=1, living=(0,))  # the other one is lost
        >>> sorted(y.item() for x, y in first.epoch(0))
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> first.stats().samples_dealt_anew, first.stats().samples_used_twice_at_most
        (4, 1)
        >>> first.close()
    """

    def __init__(
        self,
        *,
        samples: Samples,
        batch_size: int,
        member: Member,
        store: dist.Store,
        world_size: int,
        seed: int,
        threads: int = 0,
        chunk_batches: int | None = None,
        patience_seconds: float = 2.0,
        name: str = "shares",
    ) -> None:
        check_whole(1, batch_size=batch_size, world_size=world_size)
        check_whole(0, seed=seed, threads=threads)
        if chunk_batches is not None:
            check_whole(1, chunk_batches=chunk_batches)
        if len(samples) < world_size:
            raise ValueError(
                f"{len(samples)} samples do not give one to each of {world_size} ranks; start "
                "fewer."
            )
        if not patience_seconds >= 0:
            raise ValueError(f"patience_seconds is {patience_seconds}, but must be at least 0.")
        self.samples, self.batch_size, self.world_size = samples, batch_size, world_size
        self.seed, self.threads = seed, threads
        self._member, self._rank = member, member.rank
        self._batches = batches = num_batches(len(samples) // world_size, batch_size)
        self._chunk = chunk_batches or min(max(-(-batches // _CHUNKS), _LEAST_CHUNK), _MOST_CHUNK)
        self._patience_seconds = patience_seconds
        self._limit_seconds = max(patience_seconds, _CONNECT_SECONDS)
        self._asked = AskedStore(dist.PrefixStore(name, store))
        self._report: Future[None] | None = None
        self._report_seconds = 0.0
        self._reporting = self._unreported = 0
        self._is_silent = self._closed = False
        self._epochs: dict[int, _Epoch] = {}
        self._orders: dict[int, Int[np.ndarray, " sample"]] = {}
        self._disturbed: set[int] = set()
        self._own = self._position = 0
        self._samples = self._anew = self._repeated = self._untold = self._left = 0
        self._requests = 0
        self._exposed_seconds = 0.0
        self._epoch = -1

    def __len__(self) -> int:
        """Batches of this rank in an epoch while nobody comes or goes."""
        return self._batches

    @property
    def position(self) -> int:
        """How far the run is, in batches of this rank had nobody come or gone; no communication.

        After each batch one more as long as nobody does; then by the share of the epoch that all
        ranks together have trained on, as far as that is known. An epoch has `len(self)`.
        """
        return self._position

    def newest_epoch(self) -> int | None:
        """The newest epoch that any rank has begun; asks the store.

        For a rank that joins: the others may have ended the epoch that its donor was in.

        Returns:
            Its number; None if nobody has begun one, or the store does not answer in
            `patience_seconds`.
        """
        newest = self._wait(self._limit_seconds)
        return newest if newest is not None and newest >= 0 else None

    def is_behind(self) -> bool:
        """Whether another rank has begun a later epoch than this one; asks the store.

        False, too, if that does not answer in `patience_seconds`.
        """
        newest = self.newest_epoch()
        return newest is not None and newest > self._epoch

    def is_disturbed(self, epoch: int) -> bool:
        """Whether others than the ranks of the start take part in an epoch, or did; local."""
        now = self._member.membership.living != tuple(range(self.world_size))
        return now or epoch in self._disturbed

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch that this rank is dealt.

        A batch counts as used when the next one is asked for, or the iterator is closed.

        Args:
            epoch: Its number. One that is at its end has none left.
            start_batch: How many batches of the epoch this rank had used before it was resumed, as
                all ranks were. Exact where nobody had come or gone in this epoch; else some of its
                samples may be used twice, and others not at all.

        Raises:
            EvictedError: This rank is none of the living.
        """
        check_whole(0, epoch=epoch, start_batch=start_batch)
        self._epoch = epoch  # who draws no batch of it is not behind it either
        return self._drawn(epoch, start_batch)

    def stats(self) -> ElasticStats:
        """Deals so far and their cost; no communication."""
        return ElasticStats(
            samples=self._samples,
            samples_dealt_anew=self._anew,
            samples_used_twice_at_most=self._repeated,
            samples_untold=self._untold,
            samples_left=self._left,
            disturbed_epochs=len(self._disturbed),
            store_requests=self._requests,
            exposed_seconds=self._exposed_seconds,
        )

    def close(self) -> None:
        """Reports what was used, so that nobody uses it again; waits for the store for a second.

        Call it before the session is closed.
        """
        if not self._closed and self._epochs:
            self._closed = True
            leave = partial(self._leave, epochs=dict(self._epochs))
            try:
                deals, left = self._asked.ask(leave, timeout_seconds=_FAREWELL_SECONDS)
            except (RuntimeError, ValueError) as error:  # the store is silent, or not ours
                logger.debug("rank %d could not report as it left: %s", self._rank, error)
            else:
                self._left = left
                for epoch, deal in deals.items():  # it may not know the newest
                    self._install(epoch, deal)
        self._asked.close()

    def _drawn(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        before = min(start_batch, len(self)) if self._rank < self.world_size else 0
        self._begin(epoch, before)
        self._own, self._position = before, max(self._position, epoch * len(self) + before)
        ahead: deque[_Drawn] = deque()

        def draw() -> Iterator[tuple[int, Int[Tensor, " batch"]]]:
            while (drawn := self._draw(epoch)) is not None:
                ahead.append(drawn)
                yield drawn.epoch, self._indices(drawn)

        try:
            for batch in made_ahead(self._make, draw(), threads=self.threads):
                drawn = ahead.popleft()
                self._count(drawn, epoch, len(batch[1]))
                try:
                    yield batch
                finally:
                    self._use(drawn)
            self._position = max(self._position, (epoch + 1) * len(self))
        finally:
            state = self._epochs[epoch]
            state.drawn.update(state.hand)  # who breaks an epoch off skips the rest
            state.hand.clear()

    def _begin(self, epoch: int, before: int) -> None:
        for past in [each for each in self._epochs if each < epoch - _REMEMBERED_EPOCHS]:
            del self._epochs[past]
        if epoch not in self._epochs:
            self._epochs[epoch] = state = _Epoch()
            start = self._rank * len(self)
            for batch in range(start, start + before):
                state.drawn.add(batch)
                extend(state.used, batch)
            self._unreported += before

    def _draw(self, epoch: int) -> "_Drawn | None":
        """The next batch: of what this rank has been dealt of epochs before, then of this one."""
        state = self._epochs[epoch]
        while True:
            self._exchange()
            for number, each in sorted(self._epochs.items()):
                if number <= epoch and each.hand:
                    drawn = _Drawn(number, each.hand.popleft())
                    each.drawn.add(drawn.batch)
                    self._untold += self._size([drawn.batch]) if self._is_silent else 0
                    return drawn
            if state.generation >= self._member.membership.generation:
                return None
            if self._wait(self._limit_seconds) is None:
                if state.generation >= 0:
                    return None
                self._install(epoch, self._first())

    def _use(self, drawn: "_Drawn") -> None:
        """Notes that a batch was trained on; waits for a report where one more makes a chunk."""
        if (state := self._epochs.get(drawn.epoch)) is not None:
            extend(state.used, drawn.batch)
            self._unreported += 1
        self._send_report()
        if self._unreported >= self._chunk:
            self._wait(self._patience_seconds)
            self._send_report()

    def _exchange(self) -> None:
        """Takes in the deals that were made, and asks for those that are due; does not wait.

        Raises:
            EvictedError: This rank is none of the living.
            ValueError: Somebody keeps something else under the same name in the store.
        """
        view = self._member.membership
        if self._rank not in view.living:
            raise EvictedError(
                f"rank {self._rank} is none of the living ({', '.join(map(str, view.living))}) in "
                f"generation {view.generation}: no samples are dealt to it"
            )
        for epoch, state in sorted(self._epochs.items()):
            if state.question is not None and state.question.done():
                question, state.question = state.question, None
                try:
                    deal, repeated = question.result()
                except RuntimeError as error:  # the store's
                    self._lose(f"is lost ({first_line(error)})")
                else:
                    self._hear()
                    self._repeated += self._size(repeated)
                    self._install(epoch, deal)
            if state.question is None and state.generation < view.generation:
                agree = partial(self._agree, epoch=epoch, base=state.deal or self._first())
                state.question = self._asked.begin(partial(agree, view=view))

    def _send_report(self) -> None:
        """Reports what was used, if enough was; does not wait."""
        if self._report is not None and self._report.done():
            report, self._report = self._report, None
            if (error := report.exception()) is None:
                self._unreported -= self._reporting
                self._hear()
            else:
                self._lose(f"is lost ({first_line(error)})")
        now = time.monotonic()
        is_due = now - self._report_seconds >= _REPORT_SECONDS and self._unreported
        if self._report is None and (is_due or self._unreported >= max(1, self._chunk // 2)):
            self._report_seconds, self._reporting = now, self._unreported
            text = self._report_text(self._epochs)
            self._report = self._asked.begin(partial(self._set_report, text=text))

    def _wait(self, seconds: float) -> int | None:
        """Waits until all that was asked is answered; once in vain, not again until an answer.

        Returns:
            The newest epoch, -1 if there is none; None: the store has not answered.
        """
        start = time.perf_counter()
        try:
            seconds = _TRY_SECONDS if self._is_silent else seconds
            newest = self._asked.ask(self._newest, timeout_seconds=seconds)
        except StoreSilentError:
            self._lose(f"did not answer within {seconds:g} s")
        except RuntimeError as error:
            self._lose(f"is lost ({first_line(error)})")
        else:
            self._hear()
            return newest
        finally:
            self._exposed_seconds += time.perf_counter() - start
        return None

    def _hear(self) -> None:
        self._is_silent, self._limit_seconds = False, self._patience_seconds

    def _lose(self, why: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            logger.warning(
                "rank %d: the rendezvous store %s; samples are dealt without it, and where ranks "
                "come or go meanwhile, some may be used twice or not at all",
                self._rank,
                why,
                extra={"store_silent": why},
            )

    def _install(self, epoch: int, deal: Deal) -> None:
        """Takes the hand of a newer deal; what was drawn stays so."""
        state = self._epochs[epoch]
        if deal.generation <= state.generation:
            return
        if state.generation >= 0 and state.drawn:
            others = {b for rank, hand in deal.hands.items() if rank != self._rank for b in hand}
            self._repeated += self._size(state.drawn & others)
        state.deal = deal
        state.hand = deque(b for b in deal.hands.get(self._rank, ()) if b not in state.drawn)
        state.size = len(state.hand)
        left = sum(map(len, deal.hands.values()))
        state.done = 1 - left / (self.world_size * len(self))
        if tuple(deal.hands) != tuple(range(self.world_size)):
            self._disturbed.add(epoch)

    def _first(self) -> Deal:
        view = self._member.membership
        return Deal.first(view.generation, view.living, shares=self.world_size, batches=len(self))

    def _count(self, drawn: "_Drawn", epoch: int, samples: int) -> None:
        """Counts a batch that is handed out."""
        self._samples += samples
        if drawn.batch // len(self) != self._rank:
            self._anew += samples
        if drawn.epoch == epoch:
            self._own += 1
            state, done = self._epochs[epoch], self._own
            if epoch in self._disturbed and state.size:
                drawn_share = (state.size - len(state.hand)) / state.size
                progress = state.done + (1 - state.done) * drawn_share
                done = int(progress * len(self))
            self._position = max(self._position, epoch * len(self) + min(done, len(self)))

    def _make(self, item: tuple[int, Int[Tensor, " batch"]]) -> Batch:
        epoch, indices = item
        return self.samples.batch(indices, augment=(self.seed, epoch))

    def _indices(self, drawn: "_Drawn") -> Int[Tensor, " batch"]:
        """The samples of a batch, as `ShardedBatches` has them."""
        if drawn.epoch not in self._orders:
            while len(self._orders) >= _ORDERS:
                self._orders.pop(next(iter(self._orders)))
            order = epoch_order(len(self.samples), seed=self.seed, epoch=drawn.epoch)
            self._orders[drawn.epoch] = order
        share, batch = divmod(drawn.batch, len(self))
        start = batch * self.batch_size
        stop = start + self._size([drawn.batch])
        return torch.from_numpy(self._orders[drawn.epoch][share :: self.world_size][start:stop])

    def _size(self, batches: Iterable[int]) -> int:
        """Samples of batches; the last one of a share takes what is left of it."""
        last = len(self) - 1
        rest = len(self.samples) // self.world_size - last * self.batch_size
        return sum(rest if batch % len(self) == last else self.batch_size for batch in batches)

    # What the thread of `_asked` does; it reads nothing that training changes.

    def _agree(
        self, store: dist.Store, *, epoch: int, base: Deal, view: Membership
    ) -> tuple[Deal, list[int]]:
        """The deal of a generation, made here or by the rank that was first.

        Returns:
            The deal, and which batches dead ranks may have used, if it was made here.
        """
        key, text = f"deal/{epoch}", base.text()
        if (found := self._change(store, key, "", text)) != text:
            base, text = Deal.parse(found), found
        repeated: list[int] = []
        while base.generation < view.generation:
            used, have_left = self._reports(store, epoch, base)
            deal = base.next(
                view.generation, view.living, used, least=2 * self._chunk, by=self._rank
            )
            mine = deal.text()
            if (found := self._change(store, key, text, mine)) == mine:
                rest = base.rest(used)
                gone = {*base.hands} - {*view.living} - have_left
                repeated = [batch for rank in gone for batch in rest[rank][: self._chunk]]
                base = deal
            else:
                base = Deal.parse(found)
            text = found
        newest = self._change(store, _NEWEST, "", str(epoch))
        while int(newest) < epoch:
            newest = self._change(store, _NEWEST, newest, str(epoch))
        return base, repeated

    def _reports(
        self, store: dist.Store, epoch: int, deal: Deal
    ) -> tuple[dict[int, Runs], set[int]]:
        """What the ranks of a deal have reported of its epoch, and who has left."""
        texts = {rank: self._change(store, f"used/{rank}", "", "") for rank in deal.hands}
        reports = {rank: json.loads(text or "{}") for rank, text in texts.items()}
        used = {rank: report.get(str(epoch), []) for rank, report in reports.items()}
        return used, {rank for rank, report in reports.items() if "left" in report}

    def _report_text(self, epochs: "dict[int, _Epoch]", **more: bool) -> str:
        used = {str(epoch): state.used for epoch, state in sorted(epochs.items())}
        return json.dumps({**used, **more}, separators=(",", ":"))

    def _set_report(self, store: dist.Store, *, text: str) -> None:
        self._requests += 1
        store.set(f"used/{self._rank}", text)

    def _leave(
        self, store: dist.Store, *, epochs: "dict[int, _Epoch]"
    ) -> tuple[dict[int, Deal], int]:
        """Send the last report; return the newest deals, and the samples that no rank has."""
        self._set_report(store, text=self._report_text(epochs, left=True))
        living, deals, left = {*self._member.membership.living}, {}, 0
        for epoch, state in epochs.items():
            text = self._change(store, f"deal/{epoch}", "", "")
            deal = Deal.parse(text) if text else state.deal
            if deal is None:
                continue
            deals[epoch] = deal
            if self.is_disturbed(epoch) or {*deal.hands} != {*range(self.world_size)}:
                used, have_left = self._reports(store, epoch, deal)
                for rank, rest in deal.rest(used).items():
                    left += self._size(rest) if rank not in living or rank in have_left else 0
        return deals, left

    def _newest(self, store: dist.Store) -> int:
        return int(self._change(store, _NEWEST, "", "") or -1)

    def _change(self, store: dist.Store, key: str, before: str, after: str) -> str:
        """What the store has under a key after a change from `before`; "" and "" only read."""
        self._requests += 1
        return store.compare_set(key, before, after).decode()


class _Drawn(NamedTuple):
    """A batch that was drawn, by its number in the epoch."""

    epoch: int
    batch: int


@dataclass(slots=True)
class _Epoch:
    """This rank's part of one epoch.

    Attributes:
        deal: The newest that this rank has taken; None: none yet.
        hand: What it has not drawn of its hand, ...
        size: ... and how much that was when it was dealt.
        done: Share of the epoch that all together had done then.
        drawn: What was drawn or skipped.
        used: What was trained on.
        question: A deal that was asked for.
    """

    deal: Deal | None = None
    hand: deque[int] = field(default_factory=deque)
    size: int = 0
    done: float = 0.0
    drawn: set[int] = field(default_factory=set)
    used: Runs = field(default_factory=list)
    question: "Future[tuple[Deal, list[int]]] | None" = None

    @property
    def generation(self) -> int:
        """Of the deal; -1 while there is none."""
        return -1 if self.deal is None else self.deal.generation
