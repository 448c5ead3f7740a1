"""The deal of an epoch: which batches each rank has left to train on. Pure arithmetic.

An epoch has as many shares as there were ranks at the start, of equally many batches. While those
ranks live, each has its own share for its hand. With each new generation of the membership the
hands are dealt anew, by what ranks have reported of them: what the dead have left goes to the
living, and who has more left than its part gives of the end of its hand, to ranks that joined as
well as to faster ones. So a rank that has not heard yet of the new deal goes on in its hand, and
reaches what it has given away long after it has heard.
"""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """Batches in a row of one share."""

    share: int
    start: int
    stop: int


Hand = tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """The hands of an epoch.

    Attributes:
        generation: Of the membership that they were dealt for.
        hands: Of each rank, what it had left then.
        former: The generation of the deal before; -1 if there was none.
        begun: By rank, with which batch its hand begins, of all that it ever had of the epoch.
        kept: By rank, up to which of these its hand is that of the deal before.
        by: The rank that made it, which counts what may be repeated.

    Example:
        >>> deal = Deal.first(0, (0, 1, 2), shares=3, batches=4)
        >>> deal.next(1, (0, 1), {0: 1, 1: 1, 2: 2}, least=1).hands[1]
        (Piece(share=1, start=1, stop=4), Piece(share=2, start=3, stop=4))
    """

    generation: int
    hands: Mapping[int, Hand]
    former: int = -1
    begun: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    by: int = -1

    @classmethod
    def first(
        cls, generation: int, living: Collection[int], *, shares: int, batches: int
    ) -> "Deal":
        """The deal that an epoch begins with: ranks of the start have their share.

        Where others live, all shares are dealt evenly.
        """
        whole = [Piece(share, 0, batches) for share in range(shares)]
        if tuple(living) == tuple(range(shares)):
            return cls(generation=generation, hands={p.share: (p,) for p in whole})
        return cls(generation=generation, hands=_level(dict.fromkeys(living, ()), whole))

    def next(
        self,
        generation: int,
        living: Collection[int],
        used: Mapping[int, int],
        *,
        least: int,
        by: int = -1,
    ) -> "Deal":
        """The deal of a later generation.

        Args:
            generation: Its number.
            living: The ranks that take part in it.
            used: How many batches of its hand each rank has reported as trained on.
            least: Batches behind those that nobody gives away, since it may be about to train on
                them.
            by: The rank that makes it.
        """
        rest = {
            rank: part_of(hand, used.get(rank, 0), size_of(hand))
            for rank, hand in self.hands.items()
        }
        part = -(-sum(map(size_of, rest.values())) // len(living))
        kept = {rank: part_of(rest.get(rank, ()), 0, max(part, least)) for rank in sorted(living)}
        left = [
            piece
            for rank, hand in rest.items()
            for piece in part_of(hand, size_of(kept.get(rank, ())), size_of(hand))
        ]
        begun = {rank: self.begun.get(rank, 0) + used.get(rank, 0) for rank in kept}
        return Deal(
            by=by,
            generation=generation,
            hands=_level(kept, sorted(left, key=lambda piece: (piece.start, piece.share))),
            former=self.generation,
            begun=begun,
            kept={rank: begun[rank] + size_of(hand) for rank, hand in kept.items()},
        )

    def used(self, rank: int, generation: int, number: int) -> int:
        """How many batches of its hand a rank has used, by its report.

        Args:
            rank: Who.
            generation: Of the hand that it had when it reported.
            number: How far it was, of all batches that it ever had of the epoch.
        """
        begun = self.begun.get(rank, 0)
        if generation == self.former:
            number = min(number, self.kept.get(rank, 0))  # what it has given away is not its own
        elif generation != self.generation:
            number = begun
        return min(max(0, number - begun), size_of(self.hands[rank]))

    def text(self) -> str:
        """As the store has it."""
        ranks = [
            (r, self.begun.get(r, 0), self.kept.get(r, 0), hand) for r, hand in self.hands.items()
        ]
        return json.dumps((self.generation, self.former, self.by, ranks), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Deal":
        """What `text` wrote.

        Raises:
            ValueError: It is no such text.
        """
        try:
            generation, former, by, ranks = json.loads(text)
            return cls(
                by=int(by),
                generation=int(generation),
                hands={int(r): tuple(Piece(*map(int, p)) for p in h) for r, _, _, h in ranks},
                former=int(former),
                begun={int(rank): int(begun) for rank, begun, _, _ in ranks},
                kept={int(rank): int(kept) for rank, _, kept, _ in ranks},
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the store has {text[:80]!r} where deals of samples are kept: give each "
                "ElasticBatches of a run a name of its own"
            ) from error


def size_of(hand: Iterable[Piece]) -> int:
    """Batches of a hand."""
    return sum(piece.stop - piece.start for piece in hand)


def part_of(hand: Iterable[Piece], start: int, stop: int) -> Hand:
    """Batches `start` to `stop` of a hand.

    Example:
        >>> part_of([Piece(0, 4, 8), Piece(1, 0, 2)], 3, 5)
        (Piece(share=0, start=7, stop=8), Piece(share=1, start=0, stop=1))
    """
    parts, at = [], 0
    for piece in hand:
        size = piece.stop - piece.start
        low, high = max(start - at, 0), min(stop - at, size)
        if low < high:
            parts.append(Piece(piece.share, piece.start + low, piece.start + high))
        at += size
    return tuple(parts)


def _level(kept: Mapping[int, Hand], left: list[Piece]) -> dict[int, Hand]:
    """Shares out what is left, so that hands are as equally large as those that are kept allow."""
    sizes, total = {rank: size_of(hand) for rank, hand in kept.items()}, size_of(left)
    most = total + max(sizes.values(), default=0)
    level = bisect_left(
        range(most + 1), total, key=lambda level: sum(max(0, level - s) for s in sizes.values())
    )
    quotas = {rank: max(0, level - size) for rank, size in sizes.items()}
    excess = sum(quotas.values()) - total
    hands, at = {}, 0
    for rank, hand in kept.items():
        take = quotas[rank]
        if excess and take:
            take, excess = take - 1, excess - 1
        hands[rank] = (*hand, *part_of(left, at, at + take))
        at += take
    return hands
