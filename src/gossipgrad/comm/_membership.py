"""The membership of a run, one generation at a time, and its record in the store."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gossipgrad.errors import GossipError

__all__ = ["LEFT", "LOST", "Joining", "Liveness", "Loss", "Membership", "Record"]

LEFT = "left"
"""The reason of a rank that closed its session without an exception."""
LOST = "was lost"
"""How a link ended whose peer did not leave."""

_KEY = "membership"
_FORMER_KEPT = 32  # joiners that are gone again: all members read the record at every beat


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Why a rank is no longer a member.

    Attributes:
        generation: The first generation without it.
        when_seconds: When that was written, in seconds since 1970, by the writer's clock; 0 for a
            rank that never started.
        why: The reason, in words that follow "rank 3".
        left: Whether it closed its session; otherwise it was declared dead.
        by: The rank that wrote it, -1 for none.
    """

    generation: int
    when_seconds: float
    why: str
    left: bool
    by: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """How a rank became a member after the start.

    Attributes:
        generation: The first generation with it.
        when_seconds: When that was written, in seconds since 1970, by its own clock.
        donor: The rank that sent it its replica.
        introduction: The address of its links, and the fingerprint of its secret.
    """

    generation: int
    when_seconds: float
    donor: int
    introduction: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One generation: its living ranks, the ranks gone so far, and the joiners.

    Attributes:
        generation: 0 at the start, one more with every change.
        living: The ranks that take part, ascending.
        gone: The ranks that no longer take part, and why.
        joined: The ranks that joined after the start, living or not; their numbers are above those
            of the start, and none is used twice.
        joining: The ranks that wait for a replica, the last 32; they are no members yet.

    A record holds the last 32 joiners that are gone; `remembering` keeps more.
    """

    generation: int
    living: tuple[int, ...]
    gone: dict[int, Loss] = field(default_factory=dict)
    joined: dict[int, Joining] = field(default_factory=dict)
    joining: dict[int, Joining] = field(default_factory=dict)

    @classmethod
    def first(cls, world_size: int, living: Sequence[int] | None = None) -> "Membership":
        """Return a run's first membership: all ranks, or the ranks present at the start."""
        members = tuple(range(world_size) if living is None else living)
        never = Loss(generation=0, when_seconds=0.0, why="it never started", left=False, by=-1)
        absent = sorted(set(range(world_size)) - {*members})
        return cls(generation=0, living=members, gone=dict.fromkeys(absent, never))

    @property
    def lost(self) -> dict[int, Loss]:
        """The ranks that were declared dead."""
        return {rank: loss for rank, loss in self.gone.items() if not loss.left}

    def without(self, ends: Mapping[int, str], *, left: bool, by: int) -> "Membership":
        """Return the next generation without some ranks, or itself if none of them lives.

        Of many gone joiners, those gone for longest are dropped.
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

    def with_joiner(self, rank: int, introduction: Sequence[Any]) -> "Membership":
        """Return the next generation, with one more rank that waits for a replica.

        The lowest living rank is its donor.
        """
        joining = Joining(
            generation=self.generation + 1,
            when_seconds=time.time(),
            donor=min(self.living),
            introduction=tuple(introduction),
        )
        kept = sorted(self.joining)[-_FORMER_KEPT + 1 :]
        return replace(
            self,
            generation=joining.generation,
            joining={**{other: self.joining[other] for other in kept}, rank: joining},
        )

    def with_member(self, rank: int, joining: Joining) -> "Membership":
        """Return the next generation, with a joiner that has its replica."""
        assert rank not in {*self.living, *self.gone}, f"rank {rank} was a member"
        number = self.generation + 1
        return replace(
            self,
            generation=number,
            living=tuple(sorted((*self.living, rank))),
            joined={**self.joined, rank: replace(joining, generation=number)},
            joining={other: one for other, one in self.joining.items() if other != rank},
        )

    def eviction_of(self, rank: int) -> str:
        """Describe by whom and when a rank was declared dead, if that is still known."""
        how = f"long ago: it is no member in generation {self.generation}"
        if (loss := self.gone.get(rank)) is not None:
            since = f"it is no member since generation {loss.generation}"
            how = f"by rank {loss.by} ({loss.why}): {since}"
        return (
            f"rank {rank} was taken for dead {how}, and the others train on without it. Its "
            "weights are intact: save them, or start a new process from them. A process that is "
            "stopped, or in one call that lets no thread of Python run, such as the unpickling of "
            "a large file, sends no heartbeat: gg.Heartbeats(silent_seconds=60) allows for more"
        )

    def remembering(self, before: "Membership") -> "Membership":
        """Return this membership with the losses and joiners of an earlier one added."""
        gone, joined = {**before.gone, **self.gone}, {**before.joined, **self.joined}
        return replace(self, gone=gone, joined=joined)

    def to_text(self) -> str:
        """Return it as JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> "Membership":
        """Read the result of `to_text`."""
        read: dict[str, Any] = json.loads(text)
        return cls(
            generation=read["generation"],
            living=tuple(read["living"]),
            gone={int(rank): Loss(**loss) for rank, loss in read["gone"].items()},
            joined=_read_joining(read["joined"]),
            joining=_read_joining(read["joining"]),
        )


def _read_joining(read: Mapping[str, dict[str, Any]]) -> dict[int, Joining]:
    return {
        int(rank): Joining(introduction=tuple(joining.pop("introduction")), **joining)
        for rank, joining in read.items()
    }


class Liveness:
    """Who can be reached: the one record of that; methods do not block.

    A channel reports links that ended, and asks before it posts. This base class knows nothing
    else; `MemberWatch` has heartbeats, too.

    Attributes:
        down: Ranks whose links ended in this generation, and how: `LEFT`, or `LOST`.
    """

    def __init__(self) -> None:
        self.down: dict[int, str] = {}

    def is_alive(self, peer: int) -> bool:
        """Whether exchanges with a peer are possible, as far as is known here."""
        return peer not in self.down

    def report_generation(self, generation: int) -> None:
        """Report a message of a later generation than this rank's."""

    def report_down(self, peer: int, how: str) -> None:
        """Report that the link to a peer has ended."""
        self.down = {**self.down, peer: how}  # others iterate over it

    def report_reopened(self, peer: int) -> None:
        """Report that the link to a peer is made again, in another generation."""
        self.down = {other: how for other, how in self.down.items() if other != peer}

    def is_member(self) -> bool:
        """Whether this rank may send; called before each part."""
        return True

    def expelled(self) -> Collection[int]:
        """Return ranks that others have declared dead, to be removed here, too."""
        return ()


class Record:
    """The membership in the store, changed only by compare-and-set.

    So generations form one sequence: of two ranks that propose the next one, one wins, and the
    other reads the winner's. Ranks that cannot reach the store cannot write.

    Args:
        store: A store of torch's, with the same prefix on all ranks.
        first: The membership at the start, the same on all ranks; None: the store has one already.
    """

    def __init__(self, store: Any, first: Membership | None = None) -> None:
        self._store = store
        if first is not None:
            store.compare_set(_KEY, "", first.to_text())

    def read(self) -> Membership:
        """Return the newest generation."""
        return Membership.from_text(self._store.get(_KEY))

    def replace(self, current: Membership, desired: Membership) -> Membership:
        """Write `desired` if `current` is still the newest; return the newest afterwards."""
        if desired is current:
            return current
        return Membership.from_text(
            self._store.compare_set(_KEY, current.to_text(), desired.to_text())
        )

    def change(self, current: Membership, change: Callable[[Membership], Membership]) -> Membership:
        """Write and return the next generation, a change of the newest one.

        Raises:
            GossipError: No member lives any more.
        """
        while True:
            if not current.living:
                raise GossipError("the run is over: no rank can join, all members have ended")
            desired = change(current)
            current = self.replace(current, desired)
            if current == desired:
                return current
