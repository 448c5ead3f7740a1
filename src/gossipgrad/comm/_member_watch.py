"""The watch over a run's members: heartbeats, suspicion, and the next generation."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gossipgrad._messages import first_line
from gossipgrad.comm._asked_store import Deadline, StoreThread
from gossipgrad.comm._heartbeats import Heartbeats
from gossipgrad.comm._membership import LEFT, Joining, Liveness, Membership, Record
from gossipgrad.errors import EvictedError

__all__ = ["MemberWatch"]

logger = logging.getLogger(__name__)

_SUSPECT_BEATS = 3  # missed at least, by a rank whose link broke
_LOOK = 0.9  # of an interval is the least time between two looks that count
_LEAVE_SECONDS = 1.0
_LISTEN_SECONDS = 0.05
_SLOW_BEATS = 3  # in a row that took over half a lease: steps would wait for every other beat
_RENEWAL = 2.0  # times `silent_seconds`, the least time between generations of the same ranks


@dataclass(slots=True)
class _Seen:
    """The last beat of a rank, and the number of looks since then without a new beat."""

    beat: bytes
    looked_seconds: float
    looks: int = 0


@dataclass(slots=True)
class _Doubt:
    """A rank whose connection ended, and which is declared dead soon without a new heartbeat."""

    broken: int  # the generation in which its link broke, -1 if it need not be reopened
    beat: bytes | None = None  # the first that was read, perhaps older; a later one clears it


class MemberWatch(Liveness):
    """A thread that sends heartbeats, watches the next rank, and proposes generations.

    Nothing here is a collective, and no rank waits for another. Only the thread uses the store, so
    that a store that hangs blocks no other thread. The store counts as lost when it fails, when it
    does not answer in time after a lease ran out, or when it repeatedly takes over half a lease.
    Then one warning is issued, nothing waits for the store any more, the membership stays as it is,
    and training continues with the ranks that can be reached. The thread retries with new
    connections until the store answers within half a lease again.

    When a link or a collective broke and all ranks live, they continue in a new generation of the
    same ranks, which restores both; at most once in `2 * silent_seconds`.

    Args:
        store: Holds the record and the heartbeats; only the thread uses it once it runs.
        rank: This rank.
        first: The membership at the start.
        settings: Interval, lease and silence.
        reconnect: Makes a new connection to the same store after a failure; None: retry the old
            one.
        now: The clock of leases.

    Attributes:
        latest: The newest known membership.
        store_lost: Why the store cannot be used, None while it can. While it is lost, leases do not
            apply.
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
        super().__init__()
        self.latest = first
        self.store_lost: str | None = None
        self._store, self._rank, self._settings = store, rank, settings
        self._reconnect, self._now = reconnect, now
        self._record = Record(store, first)
        self._beats = 0
        self._seen: dict[int, _Seen] = {}
        self._doubts: dict[int, _Doubt] = {}
        self._renewal_due = False  # a link or a collective broke, and all ranks live
        self._renewed_seconds = -math.inf
        self._confirmed_seconds = now()
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._leaving = self._stopped = False
        self._why_left = LEFT
        self._thread: threading.Thread | None = None
        store.set(self._key(rank), "0")

    def start(self) -> None:
        """Start the heartbeats; all ranks must have created their watch before."""
        self._thread = StoreThread(self._run, self._end, name="gossipgrad-members")
        self._thread.start()

    def ask(self, introduction: Sequence[Any]) -> Joining:
        """Ask for a replica, before this rank is a member; waits for the store only."""
        rank = self._rank
        asked = self._record.change(self.latest, lambda of: of.with_joiner(rank, introduction))
        self._learn(asked)
        return asked.joining[rank]

    def enter(self, joining: Joining) -> None:
        """Make this rank a member, before `start`; waits for the store only."""
        rank = self._rank
        self._learn(self._record.change(self.latest, lambda of: of.with_member(rank, joining)))

    def look(self) -> Membership:
        """Return the newest membership, before this rank is a member; waits for the store only."""
        self._learn(self._record.read())
        return self.latest

    # -- what a channel reports and asks ------------------------------------------------------

    def report_generation(self, generation: int) -> None:
        """Query the store immediately: a peer is in a later generation."""
        if generation > self.latest.generation:
            self._wake.set()

    def report_down(self, peer: int, how: str) -> None:
        """Suspect a peer whose link ended: it is declared dead soon without a new heartbeat."""
        super().report_down(peer, how)
        self._doubt({peer}, broken=-1 if how == LEFT else self.latest.generation)

    def expelled(self) -> Collection[int]:
        """Ranks that any rank has declared dead."""
        return self.latest.lost.keys() - {self._rank}

    def is_member(self) -> bool:
        """Whether this rank may send: it is a member as far as it knows, and its lease is valid.

        Never waits: a rank with an expired lease sends nothing until `confirm` has renewed it.
        """
        if self._is_lease_old():
            self._wake.set()
            return False
        return self._rank in self.latest.living

    # -- what a session asks ----------------------------------------------------------------

    def confirm(self) -> Membership:
        """Check that this rank is still a member; local unless its lease has expired.

        In that case it waits for the store's answer for the length of a lease. Without an answer
        the store counts as lost.

        Returns:
            The newest membership, which this rank is in unless it is leaving.

        Raises:
            EvictedError: If the others have declared this rank dead.
        """
        lease_seconds, deadline = self._settings.lease_seconds, None
        while self._is_lease_old():
            deadline = deadline or Deadline(lease_seconds)
            if deadline.is_over():
                self._lose_store(f"the rendezvous store did not answer within {lease_seconds:g} s")
            self._wake.set()
            with self._changed:
                self._changed.wait_for(lambda: not self._is_lease_old(), _LISTEN_SECONDS)
        latest = self.latest  # read once: the thread may replace it at any time
        if self._leaving or self._rank in latest.living:
            return latest
        raise EvictedError(latest.eviction_of(self._rank))

    def examine(
        self,
        broken: int,
        suspects: Collection[int] = (),
        listen: Callable[[], object] = lambda: None,
    ) -> bool:
        """Whether there is a later generation than `broken`, in which a collective broke.

        Waits a few beats until each suspect has sent a heartbeat or is declared dead. If all live,
        a generation of the same ranks follows, in which no collective has broken.

        Args:
            broken: The generation.
            suspects: Ranks whose connections ended as the collective broke.
            listen: Called while waiting; notices links that break.
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
        """Record in the store that this rank leaves, unless that takes long; then stop."""
        self._leaving, self._why_left = True, why
        self.stop()

    def stop(self) -> None:
        """End the thread; ranks that watch this one will miss its heartbeats."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)

    # -- what the thread does ---------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat, read the record, and check the watched ranks."""
        began = self._now()
        self._beats += 1
        self._store.set(self._key(self._rank), str(self._beats))
        self._learn(self._record.read())
        if self._rank in self.latest.living:
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
                if broken and self._reconnect is not None:  # a failed one stays broken
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
            elif slow >= _SLOW_BEATS:  # otherwise this process may have been stopped
                self._lose_store(f"the rendezvous store is slow (a beat took {took:.1f} s)")
            pause, broken = interval, False
            if not self._stopped:
                self._wake.wait(max(0.0, interval - took))
        if self._leaving and not broken:
            with contextlib.suppress(RuntimeError):  # then this rank is found silent
                self._give_up({self._rank: self._why_left}, left=True)

    def _look(self) -> dict[int, str]:
        """Return ranks that have been silent for too long, and the reason."""
        settings = self._settings
        # A rank that is declared dead must have lost its lease by then, or it would still send.
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
        """Return the next living rank, the ranks behind silent ones, and the suspects."""
        living = self.latest.living
        index = living.index(self._rank)
        watched = []
        for peer in (*living[index + 1 :], *living[:index]):
            watched.append(peer)
            if peer not in self._seen or self._seen[peer].looks <= silent // 4:
                break
        with self._changed:
            watched += sorted(self._doubts.keys() - {*watched})
        self._seen = {peer: seen for peer, seen in self._seen.items() if peer in watched}
        return watched

    def _give_up(self, ranks: dict[int, str], *, left: bool = False) -> None:
        """Write the next generation without some ranks, if this rank is in the newest one."""
        known = None
        while self.latest is not known and {*ranks} & {*self.latest.living}:
            known = self.latest
            desired = known.without(ranks, left=left, by=self._rank)
            newest = self._record.replace(known, desired)
            self._learn(newest)
            for rank in {*known.joined} - {*newest.joined}:  # no rank watches it any more
                self._store.delete_key(self._key(rank))
            if not left:  # a rank that wrote first may have seen more: the next beat checks again
                return

    def _renew(self) -> None:
        """Write the next generation, of the same ranks, unless there was one recently."""
        pause = _RENEWAL * self._settings.silent_seconds
        if self._now() - self._renewed_seconds >= pause:
            known = self.latest
            self._learn(
                self._record.replace(known, replace(known, generation=known.generation + 1))
            )

    def _learn(self, membership: Membership) -> None:
        if membership.generation <= self.latest.generation:
            return
        if (membership.living, membership.joining) == (self.latest.living, self.latest.joining):
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
        """Make the thread watch some peers for heartbeats from now on."""
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
                # A later generation has already reopened the link.
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
                f"{self.latest.generation}), and training continues with ranks that can be reached"
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
