"""What a session knows of the members: it takes up new generations, and leaves."""

import logging
from typing import Any
from weakref import finalize

import torch.distributed as dist

from gossipgrad._messages import first_line
from gossipgrad.comm import (
    LEFT,
    Channel,
    Group,
    Heartbeats,
    Membership,
    MemberWatch,
    ScriptedDeathError,
    Transport,
    finalize_early,
    is_joinable,
)
from gossipgrad.engine._arrival import Arrival
from gossipgrad.engine._rounds import Rounds
from gossipgrad.errors import AgreementError
from gossipgrad.topology import Schedule, among

__all__ = ["Members"]

logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 0.5


class Members:
    """What a session knows of the members, and what it has taken up of that.

    A generation that the watch has learnt is taken up between two rounds, or as a collective
    begins: by each rank for itself, without waiting for anyone.

    Args:
        group: The ranks at the start.
        schedule: Who meets whom while all are there.
        heartbeats: How ranks watch over each other; None: the membership never changes.
        arrival: What one that joins knows of the others.

    Attributes:
        current: The membership that this rank trains in.
        watch: Over the members, if it changes.
        name: Of the membership, in the store of the group.
        donor: What sends this rank's replica to those who join, if any can (`Admission`).

    Raises:
        GossipError: The store cannot be reached.
    """

    def __init__(
        self,
        group: Group,
        schedule: Schedule,
        heartbeats: Heartbeats | None,
        arrival: Arrival | None = None,
    ) -> None:
        self.current = Membership.first(group.world_size, group.members)
        self.watch: MemberWatch | None = None
        self.name = ""
        self.donor: Any = None
        self._group = group
        self._channel: Channel | None = None
        self._schedule = schedule
        if arrival is not None:
            self.current, self.name = arrival.membership, arrival.name
        if heartbeats is None or group.world_size == 1:
            return

        def watch(store: dist.Store) -> MemberWatch:
            # One session may follow another on a group. The n-th here meets the n-th elsewhere.
            self.name = self.name or f"members/{store.add(f'members/{group.rank}', 1)}"

            def connect() -> dist.Store:
                # A clone has a connection of its own: what hangs in it holds up nobody else.
                root = group.store.clone()  # pyrefly: ignore[missing-attribute]
                return dist.PrefixStore(self.name, root)

            first = connect()
            return MemberWatch(first, group.rank, self.current, heartbeats, reconnect=connect)

        self.watch = group.ask(watch)
        group.follow(lambda of=self.watch: of.latest, self.name, listen=self._listen)

    def seat(self, rounds: Rounds) -> None:
        """Gives rounds the schedule of those present at the start; local."""
        rounds.schedule = among(self._schedule, self.current.living)
        self._channel = rounds.channel
        self._channel.poll()  # gives up those that did not

    @property
    def given_up(self) -> bool:
        """Whether the others are known to have taken this rank for dead."""
        return self.watch is not None and self._group.rank not in self.watch.latest.living

    def start(self) -> None:
        """Begins to watch; all ranks must have come here, or further."""
        if self.watch is not None:
            self.watch.start()

    def follow_latest(self, rounds: Rounds | None) -> bool:
        """Takes up the newest generation that is known; whether it is a later one; local.

        Raises:
            EvictedError: If this rank is no member of it.
        """
        if self.watch is None or rounds is None:
            return False
        latest = self.watch.confirm()
        if latest.generation == self.current.generation or self._group.rank not in latest.living:
            return False
        # Ctrl-C may end this anywhere; the next call then does what is left.
        self._meet_joiners(latest, rounds.channel.transport)
        rounds.schedule = among(self._schedule, latest.living)
        if rounds.channel.generation < latest.generation:
            rounds.channel.enter(latest.generation, rounds.next_round, latest.living)
        if self._group.generation < latest.generation:
            self._group.enter(latest.generation, latest.living)
        self.current = latest.remembering(self.current)
        return True

    def enter(self, rounds: Rounds, donor: int) -> None:
        """Becomes a member, where this rank joins others; waits for the store alone.

        Raises:
            GossipError: The store does not answer, or all members have ended. Should it answer
                later, the others find that this rank shows no sign of life, and go on without it.
        """
        watch, transport = self.watch, rounds.channel.transport
        assert watch is not None
        assert is_joinable(transport)
        introduction = transport.introduction
        self._group.ask(lambda _: watch.enter(donor, introduction))
        watch.start()
        self.follow_latest(rounds)

    def changed(self) -> bool:
        """Whether a collective that broke can be tried again: members were lost, or have left.

        Looks after those who may have died, which takes a few beats.
        """
        if self.watch is None or self._channel is None:
            return False
        return self.watch.examine(self.current.generation, self._group.broken_by, self._listen)

    def has_partners(self, rounds: Rounds) -> bool:
        """Whether there are other members, and a consensus with them can be had."""
        gone = rounds.channel.gone
        fixed = self.watch is None or self.watch.store_lost is not None
        others = set(self.current.living) - {self._group.rank, *gone}
        return bool(others) and not (gone and fixed)

    def closed(self) -> list[int]:
        """Ranks that closed their sessions, not by an exception, if no other rank is left."""
        gone = self.current.gone.items()
        is_alone = self.current.living == (self._group.rank,)
        return [rank for rank, loss in gone if is_alone and loss.left and loss.why == LEFT]

    def unreachable(self, rounds: Rounds | None) -> dict[int, str]:
        """See `Session.unreachable`."""
        if self.watch is None or rounds is None or (why := self.watch.store_lost) is None:
            return {}
        return {
            rank: how if how == "left" else f"its link broke, and {why}"
            for rank, how in rounds.channel.gone.items()
            if rank in self.current.living
        }

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the membership; one that dies by script just falls silent."""
        if self.donor is not None:
            self.donor.close()
        if self.watch is not None:
            if isinstance(error, ScriptedDeathError):
                self.watch.stop()
            else:
                self.watch.leave(LEFT if error is None else f"{LEFT} by {type(error).__name__}")

    def close_at_exit(self, session: object, rounds: Rounds) -> finalize:
        """Leaves a session that nobody closes, with the last word before the interpreter ends."""

        def farewell() -> None:
            rounds.stop(0.0, _FAREWELL_SECONDS)
            self.end()

        return finalize_early(session, farewell)

    def _listen(self) -> None:
        """Hears of links that broke, so that whom a collective waits for in vain is given up."""
        if self._channel is not None:
            self._channel.poll()

    def _meet_joiners(self, latest: Membership, transport: Transport) -> None:
        """Gets to know those who have joined; who is no rank of this run is none here."""
        met = transport.introductions if is_joinable(transport) else {}
        for rank in {*latest.joined} & {*latest.living} - {*met, self._group.rank}:
            try:
                assert is_joinable(transport), "only those are joined"
                transport.add_peer(rank, latest.joined[rank].introduction)
            except (AgreementError, ValueError, TypeError) as error:
                logger.warning(
                    "rank %d mixes nothing with rank %d, which has joined: %s",
                    *(self._group.rank, rank, first_line(error)),
                )
