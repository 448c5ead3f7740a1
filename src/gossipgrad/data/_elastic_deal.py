"""Shares cut into chunks, and whom a chunk goes to: pure arithmetic, the same on every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """Batches in a row of one share of an epoch."""

    epoch: int
    share: int
    start: int
    stop: int

    @property
    def batches(self) -> range:
        """Their places in the share."""
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """An epoch has as many shares as there were ranks at the start, of equally many batches.

    They are cut into chunks, which are dealt like cards: chunk k of share s is card k * shares + s,
    and card c goes to the rank at place c % n of the n that live. So while those live that began,
    rank r has share r.

    Attributes:
        shares: How many.
        batches: Of a share.
        chunk: Batches of a chunk; the last of a share may have fewer.

    Example:
        >>> deal = Deal(shares=2, batches=5, chunk=2)
        >>> [(piece.share, piece.start, piece.stop) for piece in deal.hand(0, 1, (0, 1))]
        [(1, 0, 2), (1, 2, 4), (1, 4, 5)]
        >>> [(piece.share, piece.start, piece.stop) for piece in deal.hand(0, 4, (0, 1, 4))]
        [(0, 2, 4), (1, 4, 5)]
    """

    shares: int
    batches: int
    chunk: int

    def hand(self, epoch: int, rank: int, living: Sequence[int]) -> Iterator[Piece]:
        """The chunks that go to a rank, in their order."""
        chunks = -(-self.batches // self.chunk)
        for card in range(living.index(rank), chunks * self.shares, len(living)):
            start = card // self.shares * self.chunk
            stop = min(start + self.chunk, self.batches)
            yield Piece(epoch, card % self.shares, start, stop)

    def owner(self, share: int, batch: int, living: Sequence[int]) -> int:
        """The rank that a batch is dealt to."""
        return living[(batch // self.chunk * self.shares + share) % len(living)]
