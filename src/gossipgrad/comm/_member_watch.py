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
from gossipgrad.comm._asked_store import Deadline, StoreThread
from gossipgrad.comm._heartbeats import Heartbeats
from gossipgrad.comm._liveness import Liveness
from gossipgrad.comm._membership import LEFT, Membership, Record
from gossipgrad.errors import EvictedError

__all__ = ["MemberWatch"]

logger = logging.getLogger(__name__)

_SUSPECT_BEATS = 3  # at least, without a sign of life, for one whose link broke
_LOOK = 0.9  # of an interval lies between two looks that count
_FAREWELL_SECONDS = 1.0
_LISTEN_SECONDS = 0.05
_SLOW_BEATS = 3  # in a row, that took over half a lease: steps would wait for every other one
_RENEWAL = 2.0  # so many times as long lies between generations of the same ranks, at least


@dataclass(slots=True)
class _Seen:
    """The last beat of a rank, and how often it was looked at since and had not beaten again."""

    beat: bytes
    looked_seconds: float
    looks: int = 0


@dataclass(slots=True)
class _Doubt:
    """Why a rank is given up soon, unless it shows a sign of life: a connection to it ended.

    Attributes:
        broken: The generation in which its link broke, -1 if it need not be made anew.
        beat: The first that was read, which may be older than the doubt. A later one clears it.
    """

    broken: int
    beat: bytes | None = None


class MemberWatch(Liveness):
    """A thread that beats for this rank and watches the next; learns and proposes generations.

    Nothing here is a collective, and nobody waits for another rank. Only the thread talks to the
    store, so that a store that hangs holds up nobody else. Once it fails, or does not answer in
    time when a lease has run out, or takes over half a lease again and again, it counts as lost: a
    warning says so once, nothing waits for it any more, the membership stays as it is, and training
    goes on with those who can be reached. The thread tries on, with new connections, until the
    store answers within half a lease again.

    When a link or a collective broke and all live, they go on in a new generation of the same
    ranks, in which both are made anew; not more often than each `2 * silent_seconds`.

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
        store_lost: Why the store cannot be asked, None while it can. No lease is kept meanwhile.
        visit: Called with the store in each turn of the thread while this rank is a member.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        first: Membership,
        settings: Heartbeats,
        *,
        reconnect: Callable[[], Any] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = first
        self.store_lost: str | None = None
        self.visit: Callable[[Any], object] = lambda store: None
        self._store, self._rank, self._settings = store, rank, settings
        self._reconnect, self._now = reconnect, now
        self._record = Record(store, first)
        self._beats = 0
        self._seen: dict[int, _Seen] = {}
        self._doubts: dict[int, _Doubt] = {}
        self._renewal_due = False  # a link or a collective broke, and all live
        self._renewed_seconds = -math.inf
        self._confirmed_seconds = now()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._leaving = self._stopped = False
        self._farewell = LEFT
        self._thread: threading.Thread | None = None
        store.set(self._key(rank), "0")

    def start(self) -> None:
        """Begins to beat; all ranks must have made their watch before."""
        self._thread = StoreThread(self._run, self._end, name="gossipgrad-members")
        self._thread.start()

    def enter(self, donor: int, introduction: Sequence[Any]) -> None:
        """Makes this rank a member, before `start`; waits for the store, and for nobody."""
        of = {"donor": donor, "introduction": introduction}
        self._learn(self._record.add(self.latest, self._rank, **of))

    # -- what a channel hears and asks ------------------------------------------------------

    def hear_generation(self, generation: int) -> None:
        """Someone lives in a later generation: the store is asked at once."""
        if generation > self.latest.generation:
            self._wake.set()

    def hear_end(self, peer: int, *, left: bool) -> None:
        """A link ended: if its peer shows no sign of life now, it is given up soon."""
        self._doubt({peer}, broken=-1 if left else self.latest.generation)

    def expelled(self) -> Collection[int]:
        """Ranks that were taken for dead, by whomever."""
        return self.latest.lost.keys() - {self._rank}

    def is_member(self) -> bool:
        """Whether this rank may send: it is a member as far as is known, and its lease is new.

        Never waits: a rank with an old lease sends nothing until `confirm` has renewed it.
        """
        if self._is_lease_old():
            self._wake.set()
            return False
        return self._rank in self.latest.living

    # -- what a session asks ----------------------------------------------------------------

    def confirm(self) -> Membership:
        """Makes sure that this rank is no former member; local but for an old lease.

        Then the store is asked, and its answer awaited for as long as a lease lasts. Without one
        the store counts as lost.

        Returns:
            The newest membership, which this rank is in unless it is leaving.

        Raises:
            EvictedError: If the others have given this rank up.
        """
        lease_seconds = self._settings.lease_seconds
        deadline = Deadline(lease_seconds)
        while self._is_lease_old():
            if deadline.is_over():
                self._lose_store(f"the rendezvous store did not answer within {lease_seconds:g} s")
            self._wake.set()
            with self._changed:
                self._changed.wait_for(lambda: not self._is_lease_old(), _LISTEN_SECONDS)
        latest = self.latest  # once: the thread may learn of a later one at any time
        if self._leaving or self._rank in latest.living:
            return latest
        raise EvictedError(latest.eviction_of(self._rank))

    def examine(
        self,
        broken: int,
        suspects: Collection[int] = (),
        listen: Callable[[], object] = lambda: None,
    ) -> bool:
        """Whether there is a later generation than that in which a collective broke.

        Waits until those who may have died have shown a sign of life or are given up, a few beats.
        If all live, a generation of the same ranks follows, in which no collective has broken.

        Args:
            broken: The generation.
            suspects: Whose connections ended as the collective broke.
            listen: Called in between; hears of links that break.
        """
        if self.latest.generation == broken:
            self._doubt(suspects)

        def is_over() -> object:
            later = self.latest.generation > broken
            return later or not self._doubts or self.store_lost or self._stopped

        listen()
        while not is_over():
            with self._changed:
                self._changed.wait_for(is_over, self._settings.interval_seconds)
            listen()
            self.confirm()  # finds the store lost if it hangs
        with self._changed:
            self._renewal_due |= self.latest.generation == broken
        return self.latest.generation > broken

    def leave(self, why: str = LEFT) -> None:
        """Says in the store that this rank leaves, if it can be said soon; ends."""
        self._leaving, self._farewell = True, why
        self.stop()

    def stop(self) -> None:
        """Ends the thread; those that watch this rank miss its heartbeats."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_FAREWELL_SECONDS)

    # -- what the thread does ---------------------------------------------------------------

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

    def _run(self) -> None:
        interval, lease = self._settings.interval_seconds, self._settings.lease_seconds
        pause, broken, slow = interval, False, 0
        while not self._stopped:
            self._wake.clear()
            began = self._now()
            try:
                if broken and self._reconnect is not None:  # one that failed once stays broken
                    self._store = self._reconnect()
                    self._record = Record(self._store, self.latest)
                self.beat()
            except RuntimeError as error:
                if self._stopped:
                    return
                broken = True
                self._lose_store(f"the rendezvous store is lost ({first_line(error)})")
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)
                pause = min(2 * pause, max(interval, self._settings.silent_seconds / 2))
                continue
            took = self._now() - began
            slow = slow + 1 if 2 * took > lease else 0
            if slow == 0:
                self._find_store()
            elif slow >= _SLOW_BEATS:  # else this process may have been stopped
                self._lose_store(f"the rendezvous store is slow (a beat took {took:.1f} s)")
            pause, broken = interval, False
            if not self._stopped:
                self._wake.wait(max(0.0, interval - took))
        if self._leaving and not broken:
            with contextlib.suppress(RuntimeError):  # then it falls silent
                self._give_up({self._rank: self._farewell}, left=True)

    def _look(self) -> dict[int, str]:
        """Who has been silent for too long, and why that is known."""
        settings = self._settings
        # Who is given up must have lost its lease by then, or it would still send.
        quick = math.ceil(settings.lease_seconds / (_LOOK * settings.interval_seconds))
        quick = max(_SUSPECT_BEATS, quick)
        silent = max(quick, round(settings.silent_seconds / settings.interval_seconds))
        dead: dict[int, str] = {}
        for peer in self._watched(silent):
            doubt = self._doubts.get(peer)
            beat, now = self._store.get(self._key(peer)), self._now()
            if doubt is not None and doubt.beat is None:
                doubt.beat = beat
            elif doubt is not None and doubt.beat != beat:
                self._clear(peer, doubt)
            seen = self._seen.get(peer)
            if seen is None or beat != seen.beat:
                self._seen[peer] = _Seen(beat, now)
                continue
            # Looks are counted, not seconds: this process may have been stopped.
            if now - seen.looked_seconds >= _LOOK * settings.interval_seconds:
                seen.looks, seen.looked_seconds = seen.looks + 1, now
            if doubt is not None and seen.looks >= quick:
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
        with self._changed:
            watched += sorted(self._doubts.keys() - {*watched})
        self._seen = {peer: seen for peer, seen in self._seen.items() if peer in watched}
        return watched

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
        """Writes the next generation, of the same ranks, unless there was one not long ago."""
        pause = _RENEWAL * self._settings.silent_seconds
        if self._now() - self._renewed_seconds >= pause:
            known = self.latest
            self._learn(self._record.replace(known, known.renewed()))

    def _learn(self, membership: Membership) -> None:
        if membership.generation <= self.latest.generation:
            return
        if membership.living == self.latest.living:
            self._renewed_seconds = self._now()
        for rank, loss in membership.gone.items():
            if rank in self.latest.living and rank != self._rank and not loss.left:
                logger.warning("rank %d: rank %d is lost (%s)", self._rank, rank, loss.why)
        for rank in set(membership.living) - {*self.latest.living, self._rank}:
            logger.info("rank %d: rank %d has joined", self._rank, rank)
        with self._changed:
            self.latest, self._renewal_due = membership, False
            for rank in self._doubts.keys() - {*membership.living}:
                del self._doubts[rank]
            self._changed.notify_all()

    def _doubt(self, peers: Collection[int], *, broken: int = -1) -> None:
        """Has the thread look at some peers, for a sign of life from now on."""
        with self._changed:
            for peer in {*peers} & {*self.latest.living} - {self._rank}:
                known = self._doubts.get(peer)
                if known is None or broken > known.broken:
                    self._doubts[peer] = _Doubt(broken)
        self._wake.set()

    def _clear(self, peer: int, doubt: _Doubt) -> None:
        with self._changed:
            if self._doubts.get(peer) is doubt:
                del self._doubts[peer]
                # A later generation makes the link anew already.
                self._renewal_due |= doubt.broken == self.latest.generation
                self._changed.notify_all()

    def _is_lease_old(self) -> bool:
        if self.store_lost is not None or self._stopped:
            return False
        return self._now() - self._confirmed_seconds > self._settings.lease_seconds

    def _lose_store(self, why: str) -> None:
        with self._changed:
            is_known, self.store_lost = self.store_lost is not None, why
            self._changed.notify_all()
        if not is_known:
            message = (
                f"rank {self._rank}: {why}; the membership stays as it is (generation "
                f"{self.latest.generation}), and training goes on with ranks that can be reached"
            )
            logger.warning(message, extra={"store_lost": why})

    def _find_store(self) -> None:
        if self.store_lost is not None:
            message = "rank %d: the rendezvous store answers again"
            logger.warning(message, self._rank, extra={"store_lost": None})
            self.store_lost = None

    def _end(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._wake.set()

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"
