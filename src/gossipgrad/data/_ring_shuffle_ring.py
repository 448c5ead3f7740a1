"""The ring: rows go to rank - 1 and come from rank + 1, and each belongs to one rank."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np
from jaxtyping import Int, Shaped
from torch import Tensor

from gossipgrad.comm import Header, Kind, Lost, Transport
from gossipgrad.errors import GossipError

from ._ring_shuffle_links import Incoming, Links, Outgoing
from ._ring_shuffle_rows import Parcel, Rows

logger = logging.getLogger(__name__)

_GONE = -1  # in place of the rows that a rank has given away
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that it hears that nobody waits for it any more
_LAST_WORD_SECONDS = 0.2
_NO_SLOTS = np.empty(0, dtype=np.int64)
_TOLD_AROUND = 8  # a leaver's neighbours may leave with it, and so on; those behind them are told


class Ring:
    """One rank's place in the ring. Nothing here is a collective but `drain`.

    A row belongs to exactly one rank. It passes on at one moment: when the receiver takes the
    parcel it came in, and not before. Until then it is in flight between exactly two ranks, and the
    sender keeps a copy for the case that the receiver leaves without having taken it. A receiver
    takes what has come whenever it looks, unless it has as many rows too many as the credits allow.
    So as many rows as were given away come back, each into the slot of the one that went before:
    a shard keeps its size. It is short, or has rows too many, only by what is late, which the
    credits bound.

    A rank that leaves says what it has taken; the rest goes back to who sent it, and its neighbours
    become each other's. From a rank that dies nothing can be asked: what it held and what was on
    its way to it is lost, and counted. What it still owed is written off.

    Args:
        transport: Moves the bytes.
        rows: The shard.
        run: 16 bytes that tell this ring's messages from all others.
        credits: Parcels that may be on their way to the neighbour, and as many rows as that may be
            missing here, or be here too many.
        most_rows: Rows in the largest parcel.
        deadline_seconds: How long a late neighbour is awaited; one that lets it pass is not awaited
            again before it has caught up.
        is_awaited: Whether anybody still waits for what is being done; else no wait goes on, but
            that of `close`.
        members: The ranks that came to the start; None: all.
    """

    def __init__(
        self,
        transport: Transport,
        rows: Rows,
        *,
        run: bytes,
        credits: int,
        most_rows: int,
        deadline_seconds: float = 0.0,
        is_awaited: Callable[[], bool] = lambda: True,
        members: Collection[int] | None = None,
    ) -> None:
        self.links = Links(transport, run=run, rows=rows.format, most_rows=most_rows)
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.rows = rows
        self.rows_out = self.rows_in = self.rows_lost = 0
        self.late_rounds = 0
        self.exposed_seconds = self.moving_seconds = 0.0
        self._credits = credits
        self._most_rows = most_rows
        self._deadline_seconds = deadline_seconds
        self._is_awaited = is_awaited
        self._rests = False
        self._patient = True
        self._is_uneven = False
        self._settlements = 0
        self._settling = False
        self._settled = 0
        self._settled_by: dict[int, int] = {}
        self._totals: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._leaving = False
        if members is not None:
            absent = set(range(self.world_size)) - {*members}
            self.links.gone.update(dict.fromkeys(absent, "died"))
        self.links.open()

    @property
    def extra_memory_bytes(self) -> int:
        """Memory of rows on their way or without a slot, beside the shard."""
        return sum(parcel.payload.nbytes for parcel in (*self.links.parcels, *self.rows.unplaced))

    @property
    def in_motion(self) -> int:
        """Rows on their way from here, or as many as are due here and have not come.

        What is still vacant after a settlement is not due: whoever had it is gone.
        """
        away = sum(parcel.count for parcel in self.links.in_flight)
        return max(away, 0 if self._rests else len(self.rows.vacant))

    def hand_out(
        self,
        slots: Int[np.ndarray, " row"],
        count: int,
        others: Int[np.ndarray, " other"] = _NO_SLOTS,
    ) -> tuple[Shaped[Tensor, "row ..."], ...]:
        """The rows in some slots; the first `count` that are this rank's are given away with it.

        They stay where they are, and the round is late, if the credits are used up. Where `count`
        is more than there are, rows in the slots `others` go along.
        """
        self.poll()
        self._pass_on()
        pool = slots
        if count > len(slots):
            pool = np.concatenate([slots, others])
            self.fetch(pool[:count])
        goes = self._wait_patiently(lambda: self._may_give(len(self._own(pool, count))))
        # From here on nothing comes in: what is read is what is given.
        own = self._own(pool, count)
        batch = self.rows.read(slots)
        if self.links.downstream is None:
            if self.rows.unplaced and len(own):  # what has no slot gets its turn
                self.rows.put_in(self._take_out(pool, own, batch))
        elif goes and len(own):
            start = time.perf_counter()
            self._send(self.links.downstream, self._take_out(pool, own, batch))
            self.moving_seconds += time.perf_counter() - start
        elif count > 0:
            self.late_rounds += 1
            self._is_uneven = True
        return batch

    def fetch(self, slots: Int[np.ndarray, " row"]) -> bool:
        """Whether all rows in some slots are this rank's; awaits those that are due."""
        if self.rows.held[slots].all():
            return True
        self.poll()
        return self._wait_patiently(lambda: bool(self.rows.held[slots].all()))

    def poll(self) -> None:
        """Takes in what has come."""
        self._receive(0.0)

    def drain(self, timeout_seconds: float) -> None:
        """Returns when nothing is in flight here and, if all ranks are there, all are even.

        A collective, in which only neighbours talk. Ranks that have given fewer rows than the one
        that gave most catch up, so that every shard has its size again.

        Raises:
            GossipError: A rank did not come in time; what is in flight stays so.
        """
        number = self._settlements = self._settlements + 1
        self._learn(number, self.rank, self.rows_out)
        self._settling = True
        try:
            if not self._wait(lambda: self._even(number), timeout_seconds):
                missing = sorted(set(range(self.world_size)) - set(self._totals[number]))
                what = f"ranks {missing} to call drain()" if missing else "rows to be confirmed"
                raise GossipError(
                    f"rank {self.rank} waited {timeout_seconds:g} s for {what}: every rank calls "
                    "drain(), equally often"
                )
            self._settled = number
            self._rests = True
            self._is_uneven = False
        finally:
            self._settling = False
            self._totals.pop(number)
            for link in self.links.incoming.values():
                link.due.pop(number, None)

    def close(self, linger_seconds: float) -> None:
        """Leaves, and waits at most `linger_seconds` to hear who has what was in flight; local."""
        self._receive(0.0, take_all=True)
        self._leaving = True
        for peer in self.links.around(_TOLD_AROUND):
            taken = self.links.incoming[peer].taken
            self.links.say(peer, Kind.LEAVE, round=taken, epoch=self._settled)
        self._wait(lambda: not self.links.in_flight, linger_seconds)
        if left := sum(parcel.count for parcel in self.links.in_flight):
            logger.info("rank %d left with %d rows still on their way", self.rank, left)
        self.links.transport.close(min(_LAST_WORD_SECONDS, linger_seconds))

    def _take_out(
        self,
        pool: Int[np.ndarray, " row"],
        own: Int[np.ndarray, " place"],
        batch: tuple[Shaped[Tensor, "batch ..."], ...],
    ) -> Parcel:
        """The rows in the slots `pool[own]`; `batch` has those in the first slots of `pool`."""
        if own[-1] >= len(batch[0]):
            rows = self.rows.read(pool[own])
        else:
            is_prefix = own[-1] == len(own) - 1
            rows = tuple(part[: len(own)] if is_prefix else part[own] for part in batch)
        return self.rows.take_out(pool[own], rows)

    def _own(self, slots: Int[np.ndarray, " row"], count: int) -> Int[np.ndarray, " place"]:
        """Where in `slots` the first `count` rows are that can be given; one row always stays."""
        first = np.sort(np.unique(slots, return_index=True)[1])
        return first[self.rows.held[slots[first]]][: min(count, self.rows.slots - 1)]

    def _may_give(self, count: int) -> bool:
        peer = self.links.downstream
        most = min(self._credits * self._most_rows, self.rows.slots - 1)
        return (
            peer is not None
            and len(self.links.outgoing[peer].unconfirmed) < self._credits
            and len(self.rows.vacant) + count <= most
        )

    def _pass_on(self) -> None:
        """Sends on at once what this rank has too much of, if rounds were left out somewhere.

        It has fallen behind then, and the rows are missing elsewhere. Otherwise the others are only
        a few steps ahead, and each row gets its turn.
        """
        if not self._is_uneven or self.rows.unplaced_count <= self._most_rows:
            return
        while (
            self.rows.unplaced
            and (peer := self.links.downstream) is not None
            and len(self.links.outgoing[peer].unconfirmed) < self._credits
        ):
            self._send(peer, self.rows.next_unplaced())

    def _wait_patiently(self, ready: Callable[[], bool]) -> bool:
        if ready():
            return True
        if self._deadline_seconds == 0 or not self._patient:
            return False
        start = time.perf_counter()
        self._wait(lambda: ready() or not self._more_comes(), self._deadline_seconds)
        self.exposed_seconds += time.perf_counter() - start
        if not (done := ready()) and self._more_comes():
            self._patient = False
            logger.warning("rank %d: a neighbour is late; its rows stay as they are", self.rank)
        return done

    def _more_comes(self) -> bool:
        upstream = self.links.upstream
        return upstream is not None and upstream not in self._totals[self._settlements + 1]

    def _wait(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.perf_counter() + timeout_seconds
        while not (done := ready()) and (left := deadline - time.perf_counter()) > 0:
            if not (self._leaving or self._is_awaited()):
                break
            self._receive(min(left, _WAKE_SECONDS))
        return done

    def _receive(self, timeout_seconds: float, *, take_all: bool = False) -> None:
        for event in self.links.events(timeout_seconds):
            if isinstance(event, Lost):
                self._lose(event.peer, None)
            else:
                self._hear(event)
        self._take(everything=take_all)
        unconfirmed = sum(len(link.unconfirmed) for link in self.links.outgoing.values())
        if unconfirmed <= self._credits // 2 and not self.rows.vacant:
            self._patient = True

    def _hear(self, header: Header) -> None:
        peer = header.sender
        if header.kind is Kind.DATA:
            self._is_uneven |= header.epoch == 1
        elif header.kind is Kind.VOID:
            self.links.outgoing[peer].confirm(header.round)
        elif header.kind is Kind.LEAVE:
            self._settled_by[peer] = header.epoch
            self._lose(peer, header.round)
        elif header.kind is Kind.FENCE:
            if header.bucket == peer:
                link = self.links.incoming[peer]
                link.due[header.epoch] = link.arrived
            is_open = self._settling and header.epoch == self._settlements
            if is_open or header.epoch > self._settlements:
                self._learn(header.epoch, header.bucket, header.round)

    def _take(self, *, everything: bool = False) -> None:
        for peer in list(self.links.incoming):
            self._take_from(peer, everything=everything)

    def _take_from(self, peer: int, *, everything: bool) -> None:
        link = self.links.incoming[peer]
        taken = link.taken
        start = time.perf_counter()
        while link.waiting and (everything or self._has_room(link)):
            parcel = link.waiting.popleft()
            link.taken += 1
            self.rows_in += parcel.count
            self.rows.put_in(parcel)
        if link.taken > taken:
            self.moving_seconds += time.perf_counter() - start
            self.links.say(peer, Kind.VOID, round=link.taken)

    def _has_room(self, link: Incoming) -> bool:
        if self._leaving:
            return False
        if self._settling and (totals := self._totals[self._settlements]):
            # What comes past this was sent by a rank that has settled already, and goes on.
            if _GONE in totals.values():
                return link.taken < link.due.get(self._settlements, link.arrived)
            if len(totals) == self.world_size:
                return self.rows_in < max(totals.values())
        return bool(self.rows.vacant) or (
            self.rows.unplaced_count < self._credits * self._most_rows
        )

    def _learn(self, number: int, rank: int, total: int) -> None:
        """Keeps what a rank had given away by a settlement, and tells the next."""
        totals = self._totals[number]
        if rank not in totals or (total == _GONE != totals[rank]):
            totals[rank] = total
            if self.links.downstream is not None:
                self.links.say(
                    self.links.downstream, Kind.FENCE, round=total, bucket=rank, epoch=number
                )

    def _even(self, number: int) -> bool:
        totals = self._totals[number]
        for rank in self.links.gone:
            if self._settled_by.get(rank, 0) < number:  # else it was even before it left
                self._learn(number, rank, _GONE)
        if len(totals) < self.world_size:
            return False
        if _GONE not in totals.values():
            most = max(totals.values())
            self._catch_up(most)
            if self.rows_out < most or self.rows_in < most:
                return False
        return not self.links.in_flight

    def _catch_up(self, most: int) -> None:
        while self.rows_out < most and self.links.downstream is not None:
            count = min(self._most_rows, most - self.rows_out, self.rows.slots - 1)
            slots = np.flatnonzero(self.rows.held)[:count]
            if not len(slots) or not self._may_give(len(slots)):
                return
            parcel = self.rows.take_out(slots, self.rows.read(slots))
            self._send(self.links.downstream, parcel)

    def _lose(self, peer: int, taken: int | None) -> None:
        """A rank is gone: it left, having taken everything up to a parcel, or it died (None)."""
        if peer in self.links.gone:
            self.links.transport.forget(peer)
            return
        was_upstream = peer == self.links.upstream
        link = self.links.outgoing.pop(peer, Outgoing())
        if taken is not None:
            link.confirm(taken)
        if not self._leaving:
            self._take_from(peer, everything=True)
        self.links.gone[peer] = "died" if taken is None else "left"
        count = sum(parcel.count for _, parcel in link.unconfirmed)
        if taken is None:
            self.links.transport.forget(peer)
            self.rows_lost += count
        else:
            self.rows_out -= count
            for _, parcel in reversed(link.unconfirmed):
                self.rows.put_in(parcel, first=True)
        lost = f", and {count} rows on their way to it are lost" if taken is None and count else ""
        level = logging.INFO if taken is not None else logging.WARNING
        how = self.links.gone[peer]
        logger.log(level, "rank %d: rank %d %s%s; the ring closes", self.rank, peer, how, lost)
        if was_upstream:
            self.rows.write_off()
            self.rows.place()
        if not self._leaving:
            self._close_gap()

    def _close_gap(self) -> None:
        if self.links.upstream is not None and self.links.downstream is not None:
            self.links.open()
            for number, totals in self._totals.items():
                for rank, total in totals.items():
                    self.links.say(
                        self.links.downstream, Kind.FENCE, round=total, bucket=rank, epoch=number
                    )

    def _send(self, peer: int, parcel: Parcel) -> None:
        self._rests = False
        self.rows_out += parcel.count
        self.links.send_parcel(peer, parcel, is_uneven=self._is_uneven)
