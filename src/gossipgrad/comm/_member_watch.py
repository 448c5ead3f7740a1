"""Watching over the members of a run: signs of life, suspicion, and the next generation."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gossipgrad._said import first_line
from gossipgrad.comm._heartbeats import Heartbeats
from gossipgrad.comm._membership import Membership, Record, Store
from gossipgrad.comm._store_threads import end_with_process
from gossipgrad.errors import EvictedError

__all__ = ["MemberWatch"]

logger = logging.getLogger(__name__)

_SUSPECT_BEATS = 3  # at least, without a sign of life, for one whose link broke
_LOOK = 0.9  # of an interval lies between two looks that count
_FAREWELL_SECONDS = 1.0
_RENEWALS = 6  # of generations, each pause between two of them twice the one before
_SLOW_BEATS = 3  # in a row, that took over half a lease: steps would wait for every other one
_EXAMINATION = 2.0  # may take so many times as long as a rank may be silent


@dataclass(slots=True)
class _Seen:
    """The last beat of a rank, and how often it was looked at since and had not beaten again."""

    beat: bytes
    looked_seconds: float
    looks: int = 0


class MemberWatch:
    """A thread that beats for this rank and watches the next; learns and proposes generations.

    Nothing here is a collective, and nobody waits for another rank. Only the thread talks to the
    store, so that a store that hangs holds up nobody else. Once it fails, or does not answer in
    time when a lease has run out, or takes over half a lease again and again, the membership is
    frozen: a warning says so once, nothing waits for the store any more, and training goes on with
    those who can be reached. The thread tries on, with new connections if need be, until the store
    answers within half a lease again; what it learns meanwhile counts.

    When a link or a collective broke and all live, they go on in a new generation of the same
    ranks, in which both are made anew; after ever longer pauses if they keep breaking.

    Args:
        store: Where records and beats are kept; used by the thread alone once it runs.
        rank: This rank.
        first: The membership at the start.
        settings: How often, and how long.
        reconnect: Makes a new connection to the same store once one has failed; None: the old one
            is tried again.
        now: The clock of leases.

    Attributes:
        latest: The newest membership that is known.
        frozen: Why no lease is kept and no change of the membership awaited, None while they are.
        waits: Whether `confirm` may wait for the store. Else nothing is sent meanwhile.
        visit: Called with the store in each turn of the thread while this rank is a member.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        first: Membership,
        settings: Heartbeats,
        *,
        reconnect: Callable[[], Store] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = first
        self.frozen: str | None = None
        self.waits = True
        self.visit: Callable[[Store], object] = lambda store: None
        self._store, self._rank, self._settings = store, rank, settings
        self._reconnect, self._now = reconnect, now
        self._record = Record(store, first)
        self._beats = self._slow_beats = 0
        self._seen: dict[int, _Seen] = {}
        self._suspects: set[int] = set()  # their links broke
        self._examined: set[int] = set()  # a collective broke, and nobody knows by whom
        self._unread: set[int] = set()  # of both: their beats were not read since
        self._broken_in: dict[int, int] = {}  # in which generation a link broke
        self._renewal_due = False  # a link or a collective broke, and all live
        self._renewals, self._renewed_seconds = 0, -math.inf
        self._expelled = frozenset(first.lost)
        self._confirmed_seconds = self._asked_seconds = now()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._leaving = self._stopped = False
        self._thread: threading.Thread | None = None
        store.set(self._key(rank), "0")

    def start(self) -> None:
        """Begins to beat; all ranks must have made their watch before."""
        self._thread = threading.Thread(target=self._run, name="gossipgrad-members", daemon=True)
        self._thread.start()
        end_with_process(self._thread, self._end)

    def enter(self, donor: int, introduction: Sequence[Any]) -> None:
        """Makes this rank a member, before `start`; waits for the store, and for nobody."""
        of = {"donor": donor, "introduction": introduction}
        self._learn(self._record.add(self.latest, self._rank, **of))

    def ahead(self, generation: int) -> None:
        """Someone lives in a later generation: the store is asked at once."""
        if generation > self.latest.generation:
            self._wake.set()

    def gone(self, peer: int, *, left: bool) -> None:
        """A link ended: if its peer shows no sign of life now, it is given up soon."""
        if not left:
            self._broken_in[peer] = self.latest.generation
        self._question(self._suspects, {peer})

    def expelled(self) -> Collection[int]:
        """Ranks that were taken for dead, by whomever."""
        return self._expelled

    def is_member(self) -> bool:
        """Whether this rank may send: it is a member as far as is known, and its lease is new.

        Never waits: a rank with an old lease sends nothing until `confirm` has renewed it.
        """
        if self._is_lease_old():
            self._wake.set()
            return False
        return self._rank in self.latest.living

    def confirm(self) -> Membership:
        """Makes sure that this rank is no former member; local but for an old lease.

        Returns:
            The newest membership, which this rank is in unless it is leaving.

        Raises:
            EvictedError: If the others have given this rank up.
        """
        self._renew_lease()
        latest = self.latest  # once: the thread may learn of a later one at any time
        if self._leaving or self._rank in latest.living:
            return latest
        raise EvictedError(latest.eviction_of(self._rank))

    def _is_lease_old(self) -> bool:
        if self.frozen is not None or self._stopped:
            return False
        return self._now() - self._confirmed_seconds > self._settings.lease_seconds

    def _renew_lease(self) -> None:
        """Has the store asked if the lease is old; waits for as long as another, unless stale."""
        lease, now = self._settings.lease_seconds, self._now()
        if not self._is_lease_old():
            return
        if self._asked_seconds <= self._confirmed_seconds or self.waits:
            self._asked_seconds = now
        self._wake.set()
        with self._changed:
            wait_seconds = lease if self.waits else 0.0
            known = self._changed.wait_for(lambda: not self._is_lease_old(), wait_seconds)
        if not known and (self.waits or now - self._asked_seconds > lease):
            self._freeze(f"the rendezvous store did not answer within {lease:g} s")

    def examine(
        self, listen: Callable[[], object] = lambda: None, suspects: Collection[int] = ()
    ) -> bool:
        """Whether there is a newer generation than was known at the call, once all is looked at.

        For when a collective broke: waits until every member has shown a sign of life, or those
        that did not are given up; a few beats if all live or a link broke, else `silent_seconds`.

        Args:
            listen: Called in between; hears of links that break.
            suspects: Whose connections ended as the collective broke.
        """
        known = self.latest.generation
        self._question(self._suspects, {*suspects})
        self._question(self._examined, set(self.latest.living))

        def over() -> object:
            doubted = self._suspects or self._examined
            return self.latest.generation > known or not doubted or self.frozen or self._stopped

        deadline = time.monotonic() + _EXAMINATION * self._settings.silent_seconds
        while time.monotonic() < deadline:
            listen()
            with self._changed:
                if self._changed.wait_for(over, self._settings.interval_seconds):
                    break
            self._renew_lease()  # freezes the membership if the store hangs
        return self.latest.generation > known

    def renew(self, broken: int) -> None:
        """Has a generation of the same ranks written, unless one after the `broken` is known."""
        with self._changed:
            self._renewal_due |= broken == self.latest.generation
        self._wake.set()

    def beat(self) -> None:
        """One turn of the thread: shows a sign of life, reads the record, looks at the watched."""
        began = self._now()
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats))
        self._learn(self._record.read())
        if self._rank in self.latest.living:
            self.visit(self._store)
            dead = self._look()
            if dead:
                self._give_up(dead)
            elif self._renewal_due:
                self._renew()
        with self._changed:
            self._confirmed_seconds = began
            self._changed.notify_all()

    def leave(self) -> None:
        """Says in the store that this rank leaves in order, if it can be said soon; ends."""
        self._leaving = True
        self.stop()

    def stop(self) -> None:
        """Ends the thread; whoever watches this rank sees it fall silent."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_FAREWELL_SECONDS)

    def _end(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._wake.set()

    def _run(self) -> None:
        interval, lease = self._settings.interval_seconds, self._settings.lease_seconds
        pause, broken = interval, False  # a store that is lost is tried again ever more rarely
        while not self._stopped:
            try:
                if broken:
                    self._connect()
                self._wake.clear()
                began = self._now()
                self.beat()
            except RuntimeError as error:
                if self._stopped:
                    return
                broken = True
                self._freeze(f"the rendezvous store is lost ({first_line(error)})")
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)
                pause = min(2 * pause, max(interval, self._settings.silent_seconds / 2))
            else:
                took = self._now() - began
                self._slow_beats = 0 if 2 * took <= lease else self._slow_beats + 1
                if self._slow_beats == 0:
                    self._thaw()
                elif self._slow_beats >= _SLOW_BEATS:  # else this rank may have stood still itself
                    self._freeze(f"the rendezvous store is slow (a beat took {took:.1f} s)")
                pause, broken = interval, False
                if not self._stopped:
                    self._wake.wait(max(0.0, interval - took))
        if self._leaving and not broken:
            with contextlib.suppress(RuntimeError):  # then it falls silent
                self._give_up({self._rank: "left"}, left=True)

    def _connect(self) -> None:
        """Goes on over a new connection: one that has failed once stays broken."""
        if self._reconnect is not None:
            self._store = self._reconnect()
            self._record = Record(self._store, self.latest)

    def _look(self) -> dict[int, str]:
        """Who has been silent for too long, and why that is known."""
        settings = self._settings
        # Who is given up must have lost its lease by then, or it would still send.
        quick = math.ceil(settings.lease_seconds / (_LOOK * settings.interval_seconds))
        quick = max(_SUSPECT_BEATS, quick)
        silent = max(quick, round(settings.silent_seconds / settings.interval_seconds))
        dead: dict[int, str] = {}
        for peer in self._watched(silent):
            with self._changed:
                unread = peer in self._unread
                self._unread.discard(peer)
            beat, now = self._store.get(self._key(peer)), self._now()
            seen = self._seen.get(peer)
            if seen is None or beat != seen.beat:
                self._seen[peer] = _Seen(beat, now)
                # The first beat that is read may be older than the doubt, and tells nothing.
                if seen is not None and not unread:
                    self._clear(peer)
                continue
            # Looks are counted, not seconds: this rank may have stood still itself.
            if now - seen.looked_seconds >= _LOOK * settings.interval_seconds:
                seen.looks, seen.looked_seconds = seen.looks + 1, now
            if peer in self._suspects and seen.looks >= quick:
                dead[peer] = "its link broke, and it shows no sign of life"
            elif seen.looks >= silent:
                dead[peer] = f"no sign of life for {settings.silent_seconds:g} s"
        return dead

    def _watched(self, silent: int) -> list[int]:
        """The next one among the living, and so on behind those that are silent; the doubted."""
        living = self.latest.living
        place = living.index(self._rank)
        watched = []
        for peer in (*living[place + 1 :], *living[:place]):
            watched.append(peer)
            if peer not in self._seen or self._seen[peer].looks <= silent // 4:
                break
        doubted = (self._suspects | self._examined) & set(living) - {*watched}
        for peer in set(self._seen) - {*watched, *doubted}:
            del self._seen[peer]
        return [*watched, *sorted(doubted)]

    def _give_up(self, ranks: dict[int, str], *, left: bool = False) -> None:
        """Writes the next generation, without some ranks, if this rank is in the newest one.

        Whoever was faster may have seen more, so the next beat looks again; a farewell stays true.
        """
        known = None
        while self.latest is not known and {*ranks} & {*self.latest.living}:
            known = self.latest
            desired = known.without(ranks, left=left, by=self._rank)
            newest = self._record.replace(known, desired)
            self._learn(newest)
            for rank in {*known.joined} - {*newest.joined}:  # nobody looks after it any more
                self._store.delete_key(self._key(rank))
            if not left:
                return

    def _renew(self) -> None:
        """Writes the next generation, of the same ranks, unless there was one just now."""
        pause = self._settings.silent_seconds * 2 ** min(self._renewals, _RENEWALS)
        if self._renewals == 0 or self._now() - self._renewed_seconds >= pause:
            known = self.latest
            self._learn(self._record.replace(known, known.renewed()))

    def _learn(self, membership: Membership) -> None:
        if membership.generation <= self.latest.generation:
            return
        if membership.living == self.latest.living:
            self._renewals, self._renewed_seconds = self._renewals + 1, self._now()
        for rank, loss in membership.gone.items():
            if rank in self.latest.living and rank != self._rank and not loss.left:
                logger.warning("rank %d: rank %d is lost (%s)", self._rank, rank, loss.why)
        for rank in set(membership.living) - {*self.latest.living, self._rank}:
            logger.info("rank %d: rank %d has joined", self._rank, rank)
        self._expelled |= {*membership.lost} - {self._rank}
        with self._changed:
            self.latest, self._renewal_due = membership, False
            for doubted in (self._suspects, self._examined, self._unread):
                doubted &= set(membership.living)
            self._changed.notify_all()

    def _question(self, doubted: set[int], peers: set[int]) -> None:
        """Has the thread look at some peers, for a sign of life from now on or from the thaw."""
        with self._changed:
            new = (peers & set(self.latest.living)) - {self._rank} - doubted
            if not new:
                return
            doubted |= new
            self._unread |= new
        self._wake.set()

    def _clear(self, peer: int) -> None:
        with self._changed:
            if peer not in self._unread:
                # A later generation makes the link anew already.
                broke = self._broken_in.get(peer) == self.latest.generation
                self._renewal_due |= broke and peer in self._suspects
                self._suspects.discard(peer)
                self._examined.discard(peer)
                self._changed.notify_all()

    def _freeze(self, why: str) -> None:
        with self._changed:
            told, self.frozen = self.frozen, why
            self._changed.notify_all()
        if told is None:
            message = (
                f"rank {self._rank}: {why}; the membership stays as it is (generation "
                f"{self.latest.generation}), and training goes on with whoever can be reached"
            )
            logger.warning(message, extra={"store_lost": why})

    def _thaw(self) -> None:
        if self.frozen is not None:
            self.frozen = None
            message = "rank %d: the rendezvous store answers again"
            logger.warning(message, self._rank, extra={"store_lost": None})

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"
