"""The assignment of an epoch: which batches each rank has left to train on. Pure arithmetic.

An epoch has as many shares as there were ranks at the start, of equally many batches. Batch b of
share s has the number `s * batches + b`. While those ranks live, each has its own share. With each
new generation of the membership the batches that no rank has reported are assigned again. A living
rank keeps the first of its batches. The last ones of a rank that has too many, and those of dead
ranks, go to ranks with fewer. So a rank that does not know the new assignment yet is far from the
batches that it has lost.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Runs = list[list[int]]
"""Numbers of batches as half-open ranges, in the order in which they are trained on."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The batches of each rank in an epoch.

    Attributes:
        generation: Of the membership that it was made for.
        batches: By rank.

    Example:
        >>> first = Assignment.first(0, (0, 1, 2), shares=3, batches=4)
        >>> first.next(1, (0, 1), {0: [[0, 1]], 1: [[4, 5]], 2: [[8, 10]]}, least=1).batches
        {0: [1, 2, 3, 10], 1: [5, 6, 7, 11]}
    """

    generation: int
    batches: Mapping[int, Sequence[int]]

    @classmethod
    def first(
        cls, generation: int, living: Sequence[int], *, shares: int, batches: int
    ) -> "Assignment":
        """What an epoch begins with: ranks of the start have their share."""
        if tuple(living) == tuple(range(shares)):
            own = {share: range(share * batches, (share + 1) * batches) for share in living}
            return cls(generation, own)
        whole = [share * batches + batch for batch in range(batches) for share in range(shares)]
        return cls(generation, _level({rank: [] for rank in sorted(living)}, whole))

    def next(
        self, generation: int, living: Sequence[int], used: Mapping[int, Runs], *, least: int
    ) -> "Assignment":
        """The assignment of a later generation."""
        done = {batch for runs in used.values() for batch in unpack(runs)}
        rest = {
            rank: [batch for batch in own if batch not in done]
            for rank, own in self.batches.items()
        }
        share = -(-sum(map(len, rest.values())) // len(living))
        kept = {rank: rest.get(rank, [])[: max(share, least)] for rank in sorted(living)}
        left = [batch for rank, own in rest.items() for batch in own[len(kept.get(rank, ())) :]]
        return Assignment(generation, _level(kept, left))

    def text(self) -> str:
        """As the store has it."""
        packed = [[rank, pack(own)] for rank, own in self.batches.items()]
        return json.dumps([self.generation, packed], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Assignment":
        """What `text` wrote."""
        generation, packed = json.loads(text)
        return cls(generation, {rank: unpack(runs) for rank, runs in packed})


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
    """Divides what is left, so that ranks have as equally many as those that are kept allow."""
    share, more = divmod(sum(map(len, kept.values())) + len(left), len(kept))
    batches, start = {}, 0
    for number, (rank, own) in enumerate(kept.items()):
        take = max(0, share + (number < more) - len(own))
        batches[rank] = [*own, *left[start : start + take]]
        start += take
    return batches
