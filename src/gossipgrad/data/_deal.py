"""The deal of an epoch: which batches each rank has left to train on. Pure arithmetic.

An epoch has as many shares as there were ranks at the start, of equally many batches. Batch b of
share s has the number `s * batches + b`. While those ranks live, each has its own share. With each
new generation of the membership the batches that no rank has reported are dealt again. A living
rank keeps the beginning of its hand. The end of a hand that is too long, and the hands of dead
ranks, go to ranks with fewer batches. So a rank that does not know the new deal yet is far from the
batches that it has lost.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Runs = list[list[int]]
"""Numbers of batches as half-open ranges, in the order in which they are trained on."""


@dataclass(frozen=True, slots=True)
class Deal:
    """The hands of an epoch.

    Attributes:
        generation: Of the membership that they were dealt for.
        hands: The batches of each rank.
        by: The rank that made it, which counts what the dead may have used; -1: the first deal.

    Example:
        >>> deal = Deal.first(0, (0, 1, 2), shares=3, batches=4)
        >>> deal.next(1, (0, 1), {0: [[0, 1]], 1: [[4, 5]], 2: [[8, 10]]}, least=1, by=0).hands
        {0: [1, 2, 3, 10], 1: [5, 6, 7, 11]}
    """

    generation: int
    hands: Mapping[int, Sequence[int]]
    by: int = -1

    @classmethod
    def first(cls, generation: int, living: Sequence[int], *, shares: int, batches: int) -> "Deal":
        """The deal that an epoch begins with: ranks of the start have their share.

        Where others live, all shares are dealt evenly.
        """
        if tuple(living) == tuple(range(shares)):
            hands = {share: range(share * batches, (share + 1) * batches) for share in living}
            return cls(generation, hands)
        whole = [share * batches + batch for batch in range(batches) for share in range(shares)]
        return cls(generation, _level({rank: [] for rank in sorted(living)}, whole))

    def next(
        self,
        generation: int,
        living: Sequence[int],
        used: Mapping[int, Runs],
        *,
        least: int,
        by: int,
    ) -> "Deal":
        """The deal of a later generation.

        Args:
            generation: Its number.
            living: The ranks that take part in it.
            used: What each rank of this deal has reported as trained on.
            least: Batches at the beginning of a hand that nobody gives away, since their rank may
                be about to train on them.
            by: The rank that makes it.
        """
        rest = self.rest(used)
        share = -(-sum(map(len, rest.values())) // len(living))
        kept = {rank: rest.get(rank, [])[: max(share, least)] for rank in sorted(living)}
        left = [batch for rank, hand in rest.items() for batch in hand[len(kept.get(rank, ())) :]]
        return Deal(generation, _level(kept, left), by)

    def rest(self, used: Mapping[int, Runs]) -> dict[int, list[int]]:
        """What nobody has reported of each hand."""
        done = {batch for runs in used.values() for batch in unpack(runs)}
        return {
            rank: [batch for batch in hand if batch not in done]
            for rank, hand in self.hands.items()
        }

    def text(self) -> str:
        """As the store has it."""
        hands = [[rank, pack(hand)] for rank, hand in self.hands.items()]
        return json.dumps([self.generation, self.by, hands], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Deal":
        """What `text` wrote.

        Raises:
            ValueError: It is no such text.
        """
        try:
            generation, by, hands = json.loads(text)
            return cls(int(generation), {int(r): unpack(runs) for r, runs in hands}, int(by))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the store has {text[:80]!r} where deals of samples are kept: give each "
                "ElasticBatches of a run a name of its own"
            ) from error


def pack(batches: Iterable[int]) -> Runs:
    """Numbers as ranges.

    Example:
        >>> pack([4, 5, 6, 9])
        [[4, 7], [9, 10]]
    """
    if isinstance(batches, range):
        return [[batches.start, batches.stop]]
    runs: Runs = []
    for batch in batches:
        extend(runs, batch)
    return runs


def extend(runs: Runs, batch: int) -> None:
    """Appends a number to ranges."""
    if runs and runs[-1][1] == batch:
        runs[-1][1] = batch + 1
    else:
        runs.append([batch, batch + 1])


def unpack(runs: Runs) -> list[int]:
    """The numbers in ranges."""
    return [batch for start, stop in runs for batch in range(start, stop)]


def _level(kept: Mapping[int, list[int]], left: list[int]) -> dict[int, list[int]]:
    """Deals out what is left, so that hands are as equally large as those that are kept allow."""
    share, more = divmod(sum(map(len, kept.values())) + len(left), len(kept))
    hands, at = {}, 0
    for number, (rank, hand) in enumerate(kept.items()):
        take = max(0, share + (number < more) - len(hand))
        hands[rank] = [*hand, *left[at : at + take]]
        at += take
    return hands
