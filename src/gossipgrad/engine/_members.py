"""A session's view of the members: apply new generations, and leave."""

import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import finalize

import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    LEFT,
    Channel,
    Group,
    Heartbeats,
    Joining,
    Liveness,
    Loss,
    Membership,
    MemberWatch,
    ScriptedDeathError,
    finalize_early,
    named,
)
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import AgreementError, GossipError
from gossipgrad.topology import Schedule, among

__all__ = ["GAVE_UP", "Members"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0
GAVE_UP = f"{LEFT} after it had waited in vain for others in a collective"


class Members:
    """The members of a session, in the generation that it has applied.

    Each rank applies a new generation of the watch between two rounds, or at the start of a
    collective, without waiting for others.
    """

    def __init__(
        self,
        group: Group,
        schedule: Schedule,
        heartbeats: Heartbeats | None,
        *,
        membership: Membership | None = None,
        name: str = "",
    ) -> None:
        self.current = membership or Membership.first(group.world_size, group.members)
        self.watch: MemberWatch | None = None  # None if the membership never changes
        self.liveness = Liveness()
        self.has_failed = False  # this rank waited for others in vain in its last collective
        self.name = name  # of the membership, in the store of the group
        # Returns what sends this rank's replica to joiners; None if that is gone.
        self.replica_sender: Callable[[], Callable[[list[int]], object] | None] = lambda: None
        self._group = group
        self._channel: Channel | None = None
        self._schedule = schedule
        if heartbeats is None or group.world_size == 1:
            return

        def watch(store: dist.Store) -> MemberWatch:
            # One session may follow another on a group. The n-th matches the n-th of other ranks.
            self.name = self.name or f"members/{store.add(f'members/{group.rank}', 1)}"

            def connect() -> dist.Store:
                # A clone has its own connection: a call that hangs in it blocks no other.
                root = group.store.clone()  # pyrefly: ignore[missing-attribute]
                return dist.PrefixStore(self.name, root)

            first = connect()
            return MemberWatch(first, group.rank, self.current, heartbeats, reconnect=connect)

        self.watch = self.liveness = group.ask(watch)
        group.follow(lambda of=self.watch: of.latest, self.name, listen=self._listen)

    def attach(self, rounds: Rounds) -> None:
        """Give rounds the schedule of the ranks present at the start; local."""
        rounds.schedule = among(self._schedule, self.current.living)
        self._channel = rounds.channel
        self._channel.poll()  # removes the ranks that are not present

    @property
    def given_up(self) -> bool:
        """Whether the others are known to have declared this rank dead."""
        return self.watch is not None and self._group.rank not in self.watch.latest.living

    def is_alive(self, rank: int) -> bool:
        """Whether a rank is a member of the newest known generation, and its link works."""
        newest = self.current if self.watch is None else self.watch.latest
        return rank in newest.living and self.liveness.is_alive(rank)

    def start(self) -> None:
        """Start to watch; all ranks must have reached this point."""
        if self.watch is not None:
            self.watch.start()

    def confirm(self) -> None:
        """Renew this rank's lease if it is old, before a round is sent; see `MemberWatch`."""
        if self.watch is not None:
            self.watch.confirm()

    def follow_latest(self, rounds: Rounds | None) -> bool:
        """Apply the newest known generation; return whether it is a later one; local."""
        if self.watch is None or rounds is None:
            return False
        latest = self.watch.confirm()
        if latest.generation == self.current.generation or self._group.rank not in latest.living:
            return False
        # Ctrl-C may end this anywhere; the next call then does the rest.
        self._meet_joiners(latest, rounds.channel.transport)
        rounds.schedule = among(self._schedule, latest.living)
        if rounds.channel.generation < latest.generation:
            rounds.channel.enter(latest.generation, rounds.next_round, latest.living)
        if self._group.generation < latest.generation:
            self._group.enter(latest.generation, latest.living)
        before, self.current = self.current, latest.remembering(self.current)
        asks = [
            rank
            for rank, one in latest.joining.items()
            if rank not in before.joining and one.donor == self._group.rank
        ]
        if asks and (send := self.replica_sender()) is not None:
            send(asks)
        return True

    def ask(self, rounds: Rounds) -> Joining:
        """Ask for a replica, before this rank is a member; waits for the store only."""
        watch = self.watch
        transport: Any = rounds.channel.transport
        assert watch is not None
        return self._group.ask(lambda _: watch.ask(transport.introduction))

    def is_in_record(self, rank: int) -> bool:
        """Whether a rank is a member, for a joiner that is none yet; waits for the store only."""
        watch = self.watch
        assert watch is not None
        return rank in self._group.ask(lambda _: watch.look()).living

    def enter(self, rounds: Rounds, joining: Joining) -> None:
        """Make a joiner a member; waits for the store only."""
        watch = self.watch
        assert watch is not None
        # If the store answers after an error, the others declare this rank dead: it is silent.
        self._group.ask(lambda _: watch.enter(joining))
        watch.start()
        self.follow_latest(rounds)

    def changed(self) -> bool:
        """Whether a broken collective can be retried: members were lost, or have left."""
        if self.watch is None or self._channel is None:
            return False
        return self.watch.examine(self.current.generation, self._group.broken_by, self._listen)

    def has_partners(self) -> bool:
        """Whether there are other members, and a consensus with them is possible."""
        is_fixed = self.watch is None or self.watch.store_lost is not None
        if self.liveness.down and is_fixed:
            return False
        return any(self.is_alive(rank) for rank in self.current.living if rank != self._group.rank)

    def gone_if_alone(self) -> dict[int, Loss]:
        """Return how each other rank ended, if none is left."""
        return self.current.gone if self.current.living == (self._group.rank,) else {}

    def check_store(self) -> None:
        """Raise `GossipError` if ranks are gone and the store, which removes them, is lost."""
        if gone := self.unreachable():
            assert self.watch is not None
            raise GossipError(
                f"no collective is possible any more: {named([*gone])} cannot be reached, and "
                f"cannot be removed from the run, since {self.watch.store_lost}. Training "
                "continues with the ranks that can be reached; save this rank's own replica with "
                "model.state_dict()"
            )

    def unreachable(self) -> dict[int, str]:
        """See `Session.unreachable`."""
        if self.watch is None or (why := self.watch.store_lost) is None:
            return {}
        return {
            rank: how if how == LEFT else f"its link broke, and {why}"
            for rank, how in self.liveness.down.items()
            if rank in self.current.living
        }

    def end(self, error: BaseException | None = None) -> None:
        """Leave the membership; a rank killed by a script just falls silent."""
        if self.watch is not None:
            if isinstance(error, ScriptedDeathError):
                self.watch.stop()
            else:
                why = LEFT if error is None else f"{LEFT} by {type(error).__name__}"
                self.watch.leave(GAVE_UP if self.has_failed else why)

    def close_at_exit(self, session: object, rounds: Rounds) -> finalize:
        """Leave an unclosed session at exit, with a last message to the others."""
        process = os.getpid()

        def leave() -> None:
            if os.getpid() != process:  # a forked child that ends: the session is its parent's
                return
            rounds.stop(0.0, _LEAVE_SECONDS)
            self.end()

        return finalize_early(session, leave)

    def _listen(self) -> None:
        """Notice broken links, so that a rank that a collective waits for is declared dead."""
        if self._channel is not None:
            self._channel.poll()

    def _meet_joiners(self, latest: Membership, transport: Any) -> None:
        """Add the joiners; one that cannot be added counts as gone here."""
        met = getattr(transport, "introductions", {})
        members = {rank: latest.joined[rank] for rank in latest.joined if rank in latest.living}
        known = {**latest.joining, **members}
        for rank in known.keys() - {*met, self._group.rank}:
            try:
                transport.add_peer(rank, known[rank].introduction)
            except (AgreementError, ValueError, TypeError) as error:
                logger.warning(
                    "rank %d cannot exchange with joiner rank %d: %s",
                    *(self._group.rank, rank, first_line(error)),
                )
