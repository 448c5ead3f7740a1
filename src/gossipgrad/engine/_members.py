"""A session's place in the membership: taking up new generations, and leaving."""

import logging
import threading
from collections.abc import Mapping
from weakref import finalize

import torch.distributed as dist

from gossipgrad._said import first_line
from gossipgrad.comm import (
    AskedStore,
    Channel,
    Group,
    Heartbeats,
    Loss,
    Membership,
    MemberWatch,
    ScriptedDeathError,
    Transport,
    finalize_early,
    is_joinable,
)
from gossipgrad.engine._arrival import Arrival
from gossipgrad.engine._donor import Donor
from gossipgrad.engine._rounds import Rounds
from gossipgrad.engine._stale_rounds import StaleRounds
from gossipgrad.errors import AgreementError, GossipError
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
        donor: Sends this rank's replica to those who join, if any can.
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
        self.donor: Donor | None = None
        self._group = group
        self._channel: Channel | None = None
        self._schedule = schedule
        if arrival is not None:
            self.current = arrival.membership
        if heartbeats is not None and group.world_size > 1:
            named = None if arrival is None else arrival.name
            self.watch, self.name = _watch(group, self.current, heartbeats, named)
            group.follow(self._gone, self.name, newest=self._newest, listen=self._listen)

    def seat(self, rounds: Rounds) -> None:
        """Gives rounds the schedule of those that came to the start; local."""
        if self.watch is not None:
            self.watch.waits = not isinstance(rounds, StaleRounds)
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

    def confirm(self) -> None:
        """Makes sure that this rank is a member, before something is sent.

        Raises:
            EvictedError: If it is none any more.
        """
        if self.watch is not None:
            self.watch.confirm()

    def take_up(self, rounds: Rounds | None) -> bool:
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
        self._meet_newcomers(latest, rounds.channel.transport)
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
            GossipError: The store does not answer, or all members have ended.
        """
        watch, transport = self.watch, rounds.channel.transport
        assert watch is not None
        assert is_joinable(transport)
        over = threading.Event()

        def enter(_: dist.Store) -> None:
            if over.is_set():
                return
            watch.enter(donor, transport.introduction)
            if over.is_set():  # too late: nobody beats for this rank
                watch.leave()
                watch.start()  # and says in the store that it has left

        asked = AskedStore(self._group.store)
        try:
            asked.ask(enter)
        except GossipError:
            raise
        except RuntimeError as error:
            raise GossipError(
                f"the store could not be told that rank {self._group.rank} joins: "
                f"{first_line(error)}"
            ) from error
        finally:
            over.set()  # a question without an answer by now comes to nothing
            asked.close()
        watch.start()
        self.take_up(rounds)

    def changed(self) -> bool:
        """Whether a collective that broke can be tried again: members were lost, or have left.

        Looks after all of them, which may take a few beats; `silent_seconds` if one stands still.
        """
        if self.watch is None or self._channel is None:
            return False
        newer = self.watch.latest.generation > self.current.generation
        if newer or self.watch.examine(self._listen, self._group.broken_by):
            return True
        # Later collectives are those of a generation in which none broke.
        self.watch.renew(self.current.generation)
        return False

    def meet(self, rounds: Rounds) -> bool:
        """Whether there are other members, and a consensus with them can be had."""
        gone = rounds.channel.gone
        fixed = self.watch is None or self.watch.frozen is not None
        others = set(self.current.living) - {self._group.rank, *gone}
        return bool(others) and not (gone and fixed)

    def unreachable(self, rounds: Rounds | None) -> dict[int, str]:
        """Members whose links broke, while the membership is frozen and cannot tell."""
        if self.watch is None or rounds is None or self.watch.frozen is None:
            return {}
        return {
            rank: f"its link broke, and {self.watch.frozen}"
            for rank, how in rounds.channel.gone.items()
            if how != "left" and rank in self.current.living
        }

    def departed(self, rounds: Rounds | None) -> set[int]:
        """Members whose links ended, in order or not, while the membership is frozen."""
        if self.watch is None or rounds is None or self.watch.frozen is None:
            return set()
        return {*rounds.channel.gone} & {*self.current.living}

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the membership; one that dies by script just falls silent."""
        if self.donor is not None:
            self.donor.close()
        if self.watch is not None:
            self.watch.stop() if isinstance(error, ScriptedDeathError) else self.watch.leave()

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

    def _gone(self) -> Mapping[int, Loss]:
        assert self.watch is not None
        return self.watch.latest.gone

    def _newest(self) -> int:
        assert self.watch is not None
        return self.watch.latest.generation

    def _meet_newcomers(self, latest: Membership, transport: Transport) -> None:
        """Gets to know those who have joined; who is no rank of this run is none here."""
        met = transport.introductions if is_joinable(transport) else {}
        for rank in {*latest.joined} & {*latest.living} - {*met, self._group.rank}:
            try:
                assert is_joinable(transport), "only those are joined"
                transport.take_in(rank, latest.joined[rank].introduction)
            except (AgreementError, ValueError, TypeError) as error:
                logger.warning(
                    "rank %d mixes nothing with rank %d, which has joined: %s",
                    *(self._group.rank, rank, first_line(error)),
                )


def _watch(
    group: Group, first: Membership, heartbeats: Heartbeats, name: str | None = None
) -> tuple[MemberWatch, str]:
    """A watch over the members of a group, and the name of their membership in its store.

    Without a name it is a new one.

    Raises:
        GossipError: The store cannot be reached.
    """

    def make(store: dist.Store) -> tuple[MemberWatch, str]:
        # One session may follow another on a group. The n-th here meets the n-th elsewhere.
        kept = name or f"members/{store.add(f'members/{group.rank}', 1)}"

        def connect() -> dist.Store:
            # A clone has a connection of its own: what hangs in it holds up nobody else.
            return dist.PrefixStore(kept, group.store.clone())  # pyrefly: ignore[missing-attribute]

        watch = MemberWatch(connect(), group.rank, first, heartbeats, reconnect=connect)
        return watch, kept

    asked = AskedStore(group.store)
    try:
        return asked.ask(make)
    except RuntimeError as error:
        raise GossipError(
            f"rank {group.rank} cannot reach the rendezvous store any more, which the members of "
            f"the run are kept in: has the process that holds it failed, rank 0 by default? "
            f"({first_line(error)})"
        ) from error
    finally:
        asked.close()
