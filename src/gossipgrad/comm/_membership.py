"""Who lives: a membership is a generation, and the store holds one record of it at a time."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gossipgrad.errors import GossipError

__all__ = ["LEFT", "Joining", "Loss", "Membership", "Record"]

LEFT = "left"
"""Why a rank is gone that closed its session, and not because of an exception."""

_KEY = "membership"
_FORMER_KEPT = 32  # who joined and are gone again: all members read the record at every beat


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Why a rank is no member any more.

    Attributes:
        generation: The first generation without it.
        when_seconds: When that was written, in seconds since 1970, by the clock of who wrote it; 0
            for one that never started.
        why: In words that go on after "rank 3".
        left: Whether it left in order, having closed its session; else it was taken for dead.
        by: The rank that wrote it, -1 for none.
    """

    generation: int
    when_seconds: float
    why: str
    left: bool
    by: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """How a rank became a member that was none at the start.

    Attributes:
        generation: The first generation with it.
        when_seconds: When that was written, in seconds since 1970, by its own clock.
        donor: The rank with whose replica it began.
        introduction: Where its links listen, and the fingerprint of its secret.
    """

    generation: int
    when_seconds: float
    donor: int
    introduction: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One generation: the ranks that live in it, those lost so far, and those that came later.

    Attributes:
        generation: 0 at the start, one more with every change.
        living: The ranks that take part, rising.
        gone: Those that do not any more, and why.
        joined: Those that were not there at the start, living or not; their numbers are above
            those of the start, and none is given twice.

    A record holds the last 32 of those who joined and are gone; `remembering` keeps more.
    """

    generation: int
    living: tuple[int, ...]
    gone: dict[int, Loss] = field(default_factory=dict)
    joined: dict[int, Joining] = field(default_factory=dict)

    @classmethod
    def first(cls, world_size: int, living: Sequence[int] | None = None) -> "Membership":
        """The one that a run starts with: of all ranks, or of those present at the start."""
        members = tuple(range(world_size) if living is None else living)
        never = Loss(generation=0, when_seconds=0.0, why="it never started", left=False, by=-1)
        absent = sorted(set(range(world_size)) - {*members})
        return cls(generation=0, living=members, gone=dict.fromkeys(absent, never))

    @property
    def lost(self) -> dict[int, Loss]:
        """Of those gone the ones that did not leave in order."""
        return {rank: loss for rank, loss in self.gone.items() if not loss.left}

    def without(self, ends: Mapping[int, str], *, left: bool, by: int) -> "Membership":
        """The next generation, less some ranks (with why); itself if none of them lives.

        Who joined and has been gone for longest is forgotten, where there are many.
        """
        ends = {rank: why for rank, why in ends.items() if rank in self.living}
        if not ends:
            return self
        number, now = self.generation + 1, time.time()
        losses = {
            rank: Loss(generation=number, when_seconds=now, why=why, left=left, by=by)
            for rank, why in ends.items()
        }
        gone = {**self.gone, **losses}
        former = sorted({*gone} & {*self.joined}, key=lambda rank: gone[rank].generation)
        forgotten = {*former[:-_FORMER_KEPT]}
        return replace(
            self,
            generation=number,
            living=tuple(rank for rank in self.living if rank not in ends),
            gone={rank: loss for rank, loss in gone.items() if rank not in forgotten},
            joined={
                rank: replace(joining, introduction=()) if rank in ends else joining
                for rank, joining in self.joined.items()
                if rank not in forgotten
            },
        )

    def with_newcomer(self, rank: int, *, donor: int, introduction: Sequence[Any]) -> "Membership":
        """The next generation, with one rank more that never was a member."""
        assert rank not in {*self.living, *self.gone}, f"rank {rank} was a member"
        joining = Joining(
            generation=self.generation + 1,
            when_seconds=time.time(),
            donor=donor,
            introduction=tuple(introduction),
        )
        return replace(
            self,
            generation=joining.generation,
            living=tuple(sorted((*self.living, rank))),
            joined={**self.joined, rank: joining},
        )

    def renewed(self) -> "Membership":
        """The next generation, of the same ranks."""
        return replace(self, generation=self.generation + 1)

    def eviction_of(self, rank: int) -> str:
        """For a rank that was given up: by whom and since when, unless that is forgotten."""
        how = f"long ago: it is no member in generation {self.generation}"
        if (loss := self.gone.get(rank)) is not None:
            since = f"it is no member since generation {loss.generation}"
            how = f"by rank {loss.by} ({loss.why}): {since}"
        return (
            f"rank {rank} was taken for dead {how}, and the others train on without it. Its "
            "weights are intact: save them, or start a new process from them"
        )

    def remembering(self, before: "Membership") -> "Membership":
        """This one, and who is gone and who joined by an earlier one, too."""
        gone, joined = {**before.gone, **self.gone}, {**before.joined, **self.joined}
        return replace(self, gone=gone, joined=joined)

    def to_text(self) -> str:
        """As JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> "Membership":
        """What `to_text` wrote."""
        read: dict[str, Any] = json.loads(text)
        return cls(
            generation=read["generation"],
            living=tuple(read["living"]),
            gone={int(rank): Loss(**loss) for rank, loss in read["gone"].items()},
            joined={
                int(rank): Joining(introduction=tuple(joining.pop("introduction")), **joining)
                for rank, joining in read["joined"].items()
            },
        )


class Record:
    """The membership in the store. It only ever changes by compare-and-set.

    So generations form one line: of two ranks that propose the next one, one wins, and the other
    reads what the winner wrote. A part of the ranks that cannot reach the store cannot write.

    Args:
        store: Where it is kept, one of torch's; the same prefix on all ranks.
        first: The membership at the start, the same on all ranks; None: there is one already.
    """

    def __init__(self, store: Any, first: Membership | None = None) -> None:
        self._store = store
        if first is not None:
            store.compare_set(_KEY, "", first.to_text())

    def read(self) -> Membership:
        """The newest generation."""
        return Membership.from_text(self._store.get(_KEY))

    def replace(self, current: Membership, desired: Membership) -> Membership:
        """Writes `desired` if `current` is still the newest; returns what is the newest then."""
        if desired is current:
            return current
        return Membership.from_text(
            self._store.compare_set(_KEY, current.to_text(), desired.to_text())
        )

    def add(
        self, current: Membership, rank: int, *, donor: int, introduction: Sequence[Any]
    ) -> Membership:
        """Writes the next generation with a newcomer, whatever the newest is; returns it.

        Raises:
            GossipError: Nobody lives any more whom it could join.
        """
        while rank not in {*current.living, *current.gone}:
            if not current.living:
                raise GossipError(
                    f"the run is over: rank {rank} joins nobody, all members have ended"
                )
            desired = current.with_newcomer(rank, donor=donor, introduction=introduction)
            current = self.replace(current, desired)
        return current
