"""Batches of samples that are assigned again when ranks join or leave."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from gossipgrad._messages import first_line
from gossipgrad.comm import AskedStore, Membership, StoreSilentError
from gossipgrad.errors import EvictedError

from ._assignment import Assignment, Runs, extend
from ._dataset import Samples
from ._shards import check_whole, epoch_order, made_ahead, num_batches

logger = logging.getLogger(__name__)

_CHUNKS = 16  # of a share, about, ...
_LEAST_CHUNK, _MOST_CHUNK = 4, 32  # ... of so many batches
_ORDERS = 2  # are kept: that of this epoch, and that of one which something was left of
_REPORT_SECONDS = 0.5  # between two reports at most
_CONNECT_SECONDS = 10.0  # at least, for the first answer: as long as a session waits as it begins
_TRY_SECONDS = 0.05  # for an answer of a store that was silent before
_CLOSE_SECONDS = 1.0
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
        samples_of_other_shares: Of these, those of the share of another rank.
        disturbed_epochs: In which ranks came or went, or had come or gone before.
    """

    samples: int = 0
    samples_of_other_shares: int = 0
    disturbed_epochs: int = 0


class ElasticBatches:
    """Batches of an epoch that all ranks share, also when ranks join or leave.

    For as long as those ranks live that began, they are those of `ShardedBatches`, bit for bit.
    When a rank dies, leaves or joins, the rest of the epoch is assigned again among the living
    ranks: each sample that `ShardedBatches` would give to a rank is given to a living one. What is
    known to be left of an epoch only after its end is trained on in one of the next two.

    Nobody waits for the dead: a new assignment follows from the membership and from what ranks
    have reported in the background; the first rank that writes it to the rendezvous store decides
    for all. Of a rank that dies up to a chunk of batches is unknown, and used twice. So is what
    a rank had begun of batches that went to another one before it knew.

    When the store does not answer, batches wait for it for `patience_seconds`, once; then ranks
    continue with what they have, and assign again when it answers. If ranks came or went before
    that, some samples may be used twice, or not at all.

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
        >>> from types import SimpleNamespace
        >>> from gossipgrad.data import TensorSamples
        >>> rank = SimpleNamespace(rank=0, membership=Membership(generation=1, living=(0,)))
        >>> batches = ElasticBatches(
        ...     samples=TensorSamples(torch.arange(8.0), torch.arange(8)),
        ...     batch_size=1,
        ...     member=rank,
        ...     store=dist.HashStore(),
        ...     world_size=2,
        ...     seed=0,
        ... )
        >>> sorted(y.item() for x, y in batches.epoch(0))  # rank 1 is dead
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> batches.stats().samples_of_other_shares
        4
        >>> batches.close()
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
        order = partial(epoch_order, len(samples), seed=seed)
        self._order = lru_cache(_ORDERS)(lambda epoch: order(epoch=epoch))
        self._disturbed: set[int] = set()
        self._own = self._position = 0
        self._samples = self._others = 0
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
        """The batches of an epoch that this rank is given.

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
        """What was given so far; no communication."""
        return ElasticStats(
            samples=self._samples,
            samples_of_other_shares=self._others,
            disturbed_epochs=len(self._disturbed),
        )

    def close(self) -> None:
        """Reports what was used, so that nobody uses it again; waits for the store for a second.

        Call it before the session is closed.
        """
        if not self._closed and self._epochs:
            self._closed = True
            report = partial(self._set_report, text=self._report_text())
            try:
                self._asked.ask(report, timeout_seconds=_CLOSE_SECONDS)
            except RuntimeError as error:  # the store is silent
                logger.debug("rank %d could not report as it left: %s", self._rank, error)
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
            state.drawn.update(state.ahead)  # who breaks an epoch off skips the rest
            state.ahead.clear()

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
        """The next batch: of what this rank has of epochs before, then of this one."""
        state = self._epochs[epoch]
        while True:
            self._exchange()
            for number, each in sorted(self._epochs.items()):
                if number <= epoch and each.ahead:
                    drawn = _Drawn(number, each.ahead.popleft())
                    each.drawn.add(drawn.batch)
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
        """Takes the assignments that were made, and asks for those that are due; does not wait."""
        view = self._member.membership
        if self._rank not in view.living:
            raise EvictedError(
                f"rank {self._rank} is none of the living ({', '.join(map(str, view.living))}) in "
                f"generation {view.generation}: it gets no samples"
            )
        for epoch, state in sorted(self._epochs.items()):
            if state.question is not None and state.question.done():
                question, state.question = state.question, None
                try:
                    self._install(epoch, question.result())
                except RuntimeError as error:  # the store's
                    self._warn(f"is lost ({first_line(error)})")
                else:
                    self._answered()
            if state.question is None and state.generation < view.generation:
                agree = partial(self._agree, epoch=epoch, base=state.assignment or self._first())
                state.question = self._asked.begin(partial(agree, view=view))

    def _send_report(self) -> None:
        """Reports what was used, if enough was; does not wait."""
        if self._report is not None and self._report.done():
            report, self._report = self._report, None
            if (error := report.exception()) is None:
                self._unreported -= self._reporting
                self._answered()
            else:
                self._warn(f"is lost ({first_line(error)})")
        now = time.monotonic()
        is_due = now - self._report_seconds >= _REPORT_SECONDS and self._unreported
        if self._report is None and (is_due or self._unreported >= max(1, self._chunk // 2)):
            self._report_seconds, self._reporting = now, self._unreported
            self._report = self._asked.begin(partial(self._set_report, text=self._report_text()))

    def _wait(self, seconds: float) -> int | None:
        """Waits until all that was asked is answered; once in vain, not again until an answer."""
        try:
            seconds = _TRY_SECONDS if self._is_silent else seconds
            newest = self._asked.ask(
                lambda store: int(_change(store, _NEWEST, "", "") or -1), timeout_seconds=seconds
            )
        except StoreSilentError:
            self._warn(f"did not answer within {seconds:g} s")
        except RuntimeError as error:
            self._warn(f"is lost ({first_line(error)})")
        else:
            self._answered()
            return newest
        return None

    def _answered(self) -> None:
        self._is_silent, self._limit_seconds = False, self._patience_seconds

    def _warn(self, why: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            logger.warning(
                "rank %d: the rendezvous store %s; until it answers samples are not assigned "
                "again, and if ranks come or go, some may be used twice or not at all",
                self._rank,
                why,
                extra={"store_silent": why},
            )

    def _install(self, epoch: int, assignment: Assignment) -> None:
        """Takes a newer assignment; what was drawn stays so."""
        state, batches = self._epochs[epoch], assignment.batches
        if assignment.generation <= state.generation:
            return
        state.assignment = assignment
        state.ahead = deque(b for b in batches.get(self._rank, ()) if b not in state.drawn)
        state.size = len(state.ahead)
        left = sum(map(len, batches.values()))
        state.done = 1 - left / (self.world_size * len(self))
        if tuple(batches) != tuple(range(self.world_size)):
            self._disturbed.add(epoch)

    def _first(self) -> Assignment:
        view = self._member.membership
        return Assignment.first(
            view.generation, view.living, shares=self.world_size, batches=len(self)
        )

    def _count(self, drawn: "_Drawn", epoch: int, samples: int) -> None:
        """Counts a batch that is given out."""
        self._samples += samples
        if drawn.batch // len(self) != self._rank:
            self._others += samples
        if drawn.epoch == epoch:
            self._own += 1
            state, done = self._epochs[epoch], self._own
            if epoch in self._disturbed and state.size:
                drawn_share = (state.size - len(state.ahead)) / state.size
                progress = state.done + (1 - state.done) * drawn_share
                done = int(progress * len(self))
            self._position = max(self._position, epoch * len(self) + min(done, len(self)))

    def _make(self, item: tuple[int, Int[Tensor, " batch"]]) -> Batch:
        epoch, indices = item
        return self.samples.batch(indices, augment=(self.seed, epoch))

    def _indices(self, drawn: "_Drawn") -> Int[Tensor, " batch"]:
        """The samples of a batch, as `ShardedBatches` has them."""
        share, batch = divmod(drawn.batch, len(self))
        start, whole = batch * self.batch_size, len(self.samples) // self.world_size
        stop = whole if batch == len(self) - 1 else start + self.batch_size
        return torch.from_numpy(self._order(drawn.epoch)[share :: self.world_size][start:stop])

    def _report_text(self) -> str:
        used = {str(epoch): state.used for epoch, state in sorted(self._epochs.items())}
        return json.dumps(used, separators=(",", ":"))

    # What the thread of `_asked` does; it reads nothing that training changes.

    def _agree(
        self, store: dist.Store, *, epoch: int, base: Assignment, view: Membership
    ) -> Assignment:
        """The assignment of a generation, made here or by the rank that was first."""
        key, text = f"assignment/{epoch}", base.text()
        if (found := _change(store, key, "", text)) != text:
            base, text = Assignment.parse(found), found
        while base.generation < view.generation:
            reports = {rank: _change(store, f"used/{rank}", "", "") for rank in base.batches}
            used = {rank: json.loads(each or "{}") for rank, each in reports.items()}
            used = {rank: each.get(str(epoch), []) for rank, each in used.items()}
            new = base.next(view.generation, view.living, used, least=2 * self._chunk)
            text = _change(store, key, text, new.text())
            base = Assignment.parse(text)
        newest = _change(store, _NEWEST, "", str(epoch))
        while int(newest) < epoch:
            newest = _change(store, _NEWEST, newest, str(epoch))
        return base

    def _set_report(self, store: dist.Store, *, text: str) -> None:
        store.set(f"used/{self._rank}", text)


def _change(store: dist.Store, key: str, before: str, after: str) -> str:
    """What the store has under a key after a change from `before`; "" and "" only read."""
    return store.compare_set(key, before, after).decode()


class _Drawn(NamedTuple):
    """A batch that was drawn, by its number in the epoch."""

    epoch: int
    batch: int


@dataclass(slots=True)
class _Epoch:
    """This rank's part of one epoch."""

    assignment: Assignment | None = None  # the newest that this rank has taken; None: none yet
    ahead: deque[int] = field(default_factory=deque)  # what it has not drawn of its batches,
    size: int = 0  # ... and how many that were when they were assigned
    done: float = 0.0  # share of the epoch that all together had done then
    drawn: set[int] = field(default_factory=set)  # what was drawn or skipped
    used: Runs = field(default_factory=list)  # what was trained on
    question: "Future[Assignment] | None" = None  # an assignment that was asked for

    @property
    def generation(self) -> int:
        """Of the assignment; -1 while there is none."""
        return -1 if self.assignment is None else self.assignment.generation
