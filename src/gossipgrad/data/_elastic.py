"""Batches of samples that are dealt anew when ranks come or go."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from ._dataset import Samples
from ._elastic_deal import Deal, Piece
from ._elastic_pieces import Member, Pieces
from ._elastic_stats import ElasticStats
from ._shards import check_whole, epoch_order, made_ahead, num_batches

_CHUNKS = 16  # of a share, about, ...
_LEAST_CHUNK, _MOST_CHUNK = 4, 32  # ... of so many batches
_ORDERS = 2  # are kept: that of this epoch, and that of one which something was left of

Batch = tuple[Shaped[Tensor, "batch ..."], Int[Tensor, "batch ..."]]


class _Item(NamedTuple):
    piece: Piece
    indices: Int[Tensor, " batch"]


class ElasticBatches:
    """Batches of an epoch that all ranks share, whoever comes or goes meanwhile.

    For as long as those ranks live that began, they are those of `ShardedBatches`, bit for bit.
    When a rank is lost, leaves or joins, what nobody has claimed yet is dealt anew among the
    living, from the data set that each of them can read: over an epoch every sample that
    `ShardedBatches` deals is given to one rank.

    Shares are cut into chunks of a few batches. A rank claims a chunk in the rendezvous store
    before it trains on it, in the background while it is at the chunk before, and says there how
    far it is: at every claim, every half second, and at the end. What a lost rank had claimed goes
    to others, less what it had told; that it may have trained on some of it since is the one way
    for a sample to be used twice (`samples_used_twice_at_most`). At the end of its chunks, a rank
    takes over what nobody has claimed. What is known to be left of an epoch only after its end is
    trained on in the next.

    When the store does not answer, batches wait for it for `patience_seconds`, once; then ranks go
    on with their chunks without claims, and claim again when it answers. Only what ranks that came
    or went meanwhile had to do with may then be used twice, or not at all.

    Ranks come to the end of an epoch with unequal numbers of batches once any came or went. Go
    through each epoch once, in rising order; rates should go by `position`.

    Args:
        samples: The training part, the same on all ranks.
        batch_size: Samples of a batch, the same on all ranks.
        member: This rank's session, from `gossipgrad.gossip` or `gossipgrad.join`.
        store: The rendezvous store, with the same prefix on all ranks: `session.group.store`.
        world_size: How many ranks took part at the start, also for one that joined.
        seed: Decides the order; the same on all ranks.
        threads: How many make batches ahead; worth it where samples are decoded.
        chunk_batches: Batches of a chunk, the same on all ranks; None: a sixteenth of a share, but
            4 to 32.
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
        (4, 2)
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
        chunk = chunk_batches or min(max(-(-batches // _CHUNKS), _LEAST_CHUNK), _MOST_CHUNK)
        self.samples, self.batch_size, self.world_size = samples, batch_size, world_size
        self.seed, self.threads = seed, threads
        self._rank, self._deal = member.rank, Deal(shares=world_size, batches=batches, chunk=chunk)
        self._pieces = Pieces(
            self._deal, member, dist.PrefixStore(name, store), patience_seconds=patience_seconds
        )
        self._orders: dict[int, Int[np.ndarray, " sample"]] = {}
        self._own = self._position = self._samples = self._anew = self._left = 0
        self._epoch = -1

    def __len__(self) -> int:
        """Batches of this rank in an epoch while nobody comes or goes."""
        return self._deal.batches

    @property
    def position(self) -> int:
        """How far the run is, in batches of this rank had nobody come or gone; no communication.

        After each batch one more as long as nobody does; then by the share of the epoch that all
        ranks together have trained on, as far as that is known. An epoch has `len(self)`.
        """
        return self._position

    def newest_epoch(self) -> int | None:
        """The newest epoch that any rank has begun; asks the store.

        For a rank that joins: of the epoch that it was told of, the others may be at the end.

        Returns:
            Its number; None if nobody has begun one, or the store does not answer in
            `patience_seconds`.
        """
        return self._pieces.newest_epoch()

    def is_behind(self) -> bool:
        """Whether another rank has begun a later epoch than this one; asks the store.

        False, too, if that does not answer in `patience_seconds`.
        """
        newest = self.newest_epoch()
        return newest is not None and newest > self._epoch

    def is_disturbed(self, epoch: int) -> bool:
        """Whether others than the ranks of the start take part in an epoch, or did; local."""
        first = tuple(range(self.world_size))
        return epoch in self._pieces.claims.disturbed or self._pieces.living != first

    def epoch(self, epoch: int, *, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch that this rank gets, as they are claimed.

        A batch counts as used when the next one is asked for, or the iterator is let go.

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
        self._pieces.begin(epoch, before)
        self._own, self._position = before, max(self._position, epoch * len(self) + before)
        drawn: deque[Piece] = deque()

        def items() -> Iterator[_Item]:
            for piece in self._pieces.of(epoch):
                for batch in piece.batches:
                    one = piece._replace(start=batch, stop=batch + 1)
                    drawn.append(one)
                    yield _Item(one, torch.from_numpy(self._indices(one)))

        try:
            for batch in made_ahead(self._make, items(), threads=self.threads):
                piece = drawn.popleft()
                self._count(piece, epoch, len(batch[1]))
                try:
                    yield batch
                finally:
                    self._pieces.use(piece)
            self._position = max(self._position, (epoch + 1) * len(self))
        finally:
            self._pieces.end(epoch)

    def stats(self) -> ElasticStats:
        """What was dealt anew so far, and what it took; no communication."""
        claims = self._pieces.claims
        return ElasticStats(
            samples=self._samples,
            samples_dealt_anew=self._anew,
            samples_used_twice_at_most=self._size(claims.begun),
            samples_untold=self._size(self._pieces.untold),
            samples_left=self._left,
            disturbed_epochs=len(claims.disturbed),
            store_requests=claims.requests,
            exposed_seconds=self._pieces.exposed_seconds,
        )

    def close(self) -> None:
        """Tells what was used, so that nobody uses it again; waits for the store for a second.

        Call it before the session is closed.
        """
        self._left = self._size(self._pieces.close())

    def _count(self, piece: Piece, epoch: int, samples: int) -> None:
        """Counts a batch that is handed out."""
        self._samples += samples
        if piece.share != self._rank:
            self._anew += samples
        if piece.epoch != epoch:
            return
        self._own += 1
        done = self._own
        if (last := self._pieces.claims.done.get(epoch)) is not None:
            # The others are taken to have gone on as this rank has since they were asked.
            since = (self._own - last.own) * last.living
            done = (last.others + last.own + since) // self.world_size
        self._position = max(self._position, epoch * len(self) + min(done, len(self)))

    def _make(self, item: _Item) -> Batch:
        return self.samples.batch(item.indices, augment=(self.seed, item.piece.epoch))

    def _indices(self, piece: Piece) -> Int[np.ndarray, " batch"]:
        """The samples of a batch, as `ShardedBatches` has them."""
        if piece.epoch not in self._orders:
            while len(self._orders) >= _ORDERS:
                self._orders.pop(next(iter(self._orders)))
            order = epoch_order(len(self.samples), seed=self.seed, epoch=piece.epoch)
            self._orders[piece.epoch] = order
        start, stop = self._bounds(piece)
        share = self._orders[piece.epoch][piece.share :: self.world_size]
        return share[start:stop]

    def _bounds(self, piece: Piece) -> tuple[int, int]:
        """Places in its share of the samples of a piece: a last batch takes what is left."""
        last = piece.stop == len(self)
        stop = len(self.samples) // self.world_size if last else piece.stop * self.batch_size
        return piece.start * self.batch_size, stop

    def _size(self, pieces: Iterable[Piece]) -> int:
        return sum(stop - start for start, stop in map(self._bounds, pieces))
