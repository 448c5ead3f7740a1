"""Batches of samples that are dealt anew when ranks come or go."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from ._dataset import Samples
from ._elastic_deal import Piece
from ._elastic_dealer import Dealer, Drawn, Member
from ._shards import check_whole, epoch_order, made_ahead, num_batches

_CHUNKS = 16  # of a share, about, ...
_LEAST_CHUNK, _MOST_CHUNK = 4, 32  # ... of so many batches
_ORDERS = 2  # are kept: that of this epoch, and that of one which something was left of

Batch = tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]


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
    """Batches of an epoch that all ranks share, also when ranks come or go meanwhile.

    For as long as those ranks live that began, they are those of `ShardedBatches`, bit for bit.
    When a rank is lost, leaves or joins, what is left of the epoch is dealt anew among the living,
    from the data set that each of them can read: over an epoch every sample that `ShardedBatches`
    deals is given to a rank.

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
        batches = num_batches(len(samples) // world_size, batch_size)
        self.samples, self.batch_size, self.world_size = samples, batch_size, world_size
        self.seed, self.threads = seed, threads
        self._batches, self._rank = batches, member.rank
        self._dealer = Dealer(
            member,
            dist.PrefixStore(name, store),
            shares=world_size,
            batches=batches,
            chunk=chunk_batches or min(max(-(-batches // _CHUNKS), _LEAST_CHUNK), _MOST_CHUNK),
            patience_seconds=patience_seconds,
        )
        # Who forgets to close them leaves no thread behind.
        weakref.finalize(self, self._dealer.end_thread)
        self._orders: dict[int, Int[np.ndarray, " sample"]] = {}
        self._own = self._position = self._samples = self._anew = 0
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
        return self._dealer.newest_epoch()

    def is_behind(self) -> bool:
        """Whether another rank has begun a later epoch than this one; asks the store.

        False, too, if that does not answer in `patience_seconds`.
        """
        newest = self.newest_epoch()
        return newest is not None and newest > self._epoch

    def is_disturbed(self, epoch: int) -> bool:
        """Whether others than the ranks of the start take part in an epoch, or did; local."""
        return self._dealer.is_disturbed(epoch)

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

    def _drawn(self, epoch: int, start_batch: int) -> Iterator[Batch]:
        before = min(start_batch, len(self)) if self._rank < self.world_size else 0
        self._dealer.begin(epoch, before)
        self._own, self._position = before, max(self._position, epoch * len(self) + before)
        ahead: deque[Drawn] = deque()

        def draw() -> Iterator[tuple[int, Int[Tensor, " batch"]]]:
            while (drawn := self._dealer.draw(epoch)) is not None:
                ahead.append(drawn)
                yield drawn.epoch, self._indices(drawn)

        try:
            for batch in made_ahead(self._make, draw(), threads=self.threads):
                drawn = ahead.popleft()
                self._count(drawn, epoch, len(batch[1]))
                try:
                    yield batch
                finally:
                    self._dealer.use(drawn)
            self._position = max(self._position, (epoch + 1) * len(self))
        finally:
            self._dealer.end(epoch)

    def stats(self) -> ElasticStats:
        """What was dealt anew so far, and what it took; no communication."""
        dealer = self._dealer
        return ElasticStats(
            samples=self._samples,
            samples_dealt_anew=self._anew,
            samples_used_twice_at_most=self._size(dealer.repeated),
            samples_untold=self._size(Piece(d.share, d.batch, d.batch + 1) for d in dealer.untold),
            samples_left=self._size(dealer.left),
            disturbed_epochs=len(dealer.disturbed),
            store_requests=dealer.requests,
            exposed_seconds=dealer.exposed_seconds,
        )

    def close(self) -> None:
        """Reports what was used, so that nobody uses it again; waits for the store for a second.

        Call it before the session is closed.
        """
        self._dealer.close()

    def _count(self, drawn: Drawn, epoch: int, samples: int) -> None:
        """Counts a batch that is handed out."""
        self._samples += samples
        if drawn.share != self._rank:
            self._anew += samples
        if drawn.epoch == epoch:
            self._own += 1
            progress = self._dealer.progress(epoch)
            done = self._own if progress is None else int(progress * len(self))
            self._position = max(self._position, epoch * len(self) + min(done, len(self)))

    def _make(self, item: tuple[int, Int[Tensor, " batch"]]) -> Batch:
        epoch, indices = item
        return self.samples.batch(indices, augment=(self.seed, epoch))

    def _indices(self, drawn: Drawn) -> Int[Tensor, " batch"]:
        """The samples of a batch, as `ShardedBatches` has them."""
        if drawn.epoch not in self._orders:
            while len(self._orders) >= _ORDERS:
                self._orders.pop(next(iter(self._orders)))
            order = epoch_order(len(self.samples), seed=self.seed, epoch=drawn.epoch)
            self._orders[drawn.epoch] = order
        start, stop = self._bounds(Piece(drawn.share, drawn.batch, drawn.batch + 1))
        share = self._orders[drawn.epoch][drawn.share :: self.world_size]
        return torch.from_numpy(share[start:stop])

    def _bounds(self, piece: Piece) -> tuple[int, int]:
        """The samples of a piece in its share: a last batch takes what is left."""
        last = piece.stop == len(self)
        stop = len(self.samples) // self.world_size if last else piece.stop * self.batch_size
        return piece.start * self.batch_size, stop

    def _size(self, pieces: Iterable[Piece]) -> int:
        return sum(stop - start for start, stop in map(self._bounds, pieces))
