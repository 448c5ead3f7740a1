"""The ring: rows go to rank - 1 and come from rank + 1, and each belongs to one rank."""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gossipgrad.comm import Header, Kind, Lost, Received, Transport, WireError
from gossipgrad.errors import GossipError

from ._rows import Packed, Parcel, Rows

logger = logging.getLogger(__name__)

_UNKNOWN, _GONE = -1, 1 << 62  # in place of the rows that a rank has given away
_LAST_WORD_SECONDS = 0.2
_NOTIFIED = 8  # ranks on either side of one that leaves: its neighbours may leave with it


class Ring:
    """One rank's part of the ring. Nothing here is a collective but `drain`.

    A row belongs to exactly one rank. It passes on when it arrives. The receiver puts it into the
    slot of the row that it gave away longest ago, and confirms a parcel of rows once all have a
    slot. A sender keeps what is unconfirmed, at most `credits` parcels: it comes back if the
    receiver leaves before it arrived. So as many rows come back as were given away, and a shard
    keeps its size. It is short, or has rows too many, by what is late alone, and the credits bound
    that.

    A rank that leaves says what has arrived at it, and its neighbours become each other's. From a
    rank that dies nothing can be asked: what it held and what was on its way to it is lost, and
    counted. What it still owed is written off.

    The headers are those of all links: `DATA` brings `bucket` rows as parcel number `round`, after
    `generation` drains, with `epoch` 1 if rounds were left out; `VOID` confirms everything up to
    parcel `round`; `FENCE` brings what ranks had sent by drain number `epoch`,
    or tells the rank upstream (`bucket` 1) that the sender has come there; `LEAVE` says that
    nothing past parcel `round` is accepted, and nothing more comes, after `epoch` drains. What
    does not fit is dropped and counted; a parcel that is dropped stays its sender's.

    Args:
        transport: Moves the bytes.
        rows: The shard.
        run: 16 bytes that tell this ring's messages from all others.
        credits: Parcels that may be on their way to the neighbour, and as many rows as that may be
            missing here.
        most_rows: Rows in the largest parcel.
        deadline_seconds: How long a late neighbour is awaited; one that lets it pass is not awaited
            again before it has caught up.
        members: The ranks at the start.

    Attributes:
        gone: Ranks that left or died, and which of both.
    """

    def __init__(
        self,
        transport: Transport,
        rows: Rows,
        *,
        run: bytes,
        credits: int,
        most_rows: int,
        deadline_seconds: float,
        members: Collection[int],
    ) -> None:
        self.transport, self.rows = transport, rows
        self.rank, self.world_size = transport.rank, transport.world_size
        self.gone = {rank: "died" for rank in range(self.world_size) if rank not in members}
        self.rows_out = self.rows_in = self.rows_lost = 0
        self.bytes_sent = self.bytes_received = 0
        self.late_rounds = self.refused = 0
        self.exposed_seconds = self.moving_seconds = 0.0
        self._run, self._credits, self._most_rows = run, credits, most_rows
        self._deadline_seconds = deadline_seconds
        self._is_patient, self._is_uneven, self._is_leaving = True, False, False
        self._sent: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._unconfirmed: defaultdict[int, deque[tuple[int, Packed]]] = defaultdict(deque)
        # Drains: how many this rank has begun and ended, others have ended; rows given away by all.
        self._drains = self._drained = 0
        self._drain_of: Counter[int] = Counter()  # the newest that a neighbour has entered
        self._drained_by: dict[int, int] = {}
        self._totals: dict[int, Int[np.ndarray, " rank"]] = {}
        self._is_draining = self._is_even_now = False
        self._ahead: set[int] = set()  # ranks that have ended a drain that this one is in, ...
        self._early: list[Received | Lost] = []  # ... and what came from them since
        self._open()

    @property
    def downstream(self) -> int | None:
        """Who gets this rank's rows: the next below that is not gone, None if all are."""
        return self._next(-1)

    @property
    def upstream(self) -> int | None:
        """Whose rows come here: the next above that is not gone."""
        return self._next(1)

    @property
    def in_flight(self) -> list[Packed]:
        """What was given away and not confirmed."""
        return [rows for link in self._unconfirmed.values() for _, rows in link]

    @property
    def extra_memory_bytes(self) -> int:
        """Memory of rows on their way or without a slot, beside the shard."""
        unplaced = [parcel.rows for parcel in self.rows.unplaced]
        return sum(rows.nbytes for rows in (*self.in_flight, *unplaced))

    @property
    def in_motion(self) -> int:
        """Rows on their way from here, or as many as are due here and have not come.

        What is still vacant after `drain` is not due: the rank that had it is gone.
        """
        away = sum(map(len, self.in_flight))
        return max(away, 0 if self._is_even_now else len(self.rows.vacant))

    def hand_out(
        self, slots: Int[np.ndarray, " row"], count: int, before: Int[np.ndarray, " used"]
    ) -> Packed:
        """The rows in some slots; the first `count` that are this rank's are given away with it.

        They stay where they are, and the round is late, if the credits are used up. Where `count`
        is more than there are, rows in the slots of the batches `before` go along.
        """
        self.poll()
        self._pass_on()
        pool = slots if count <= len(slots) else np.concatenate([slots, before])
        if count > len(slots):
            self.fetch(pool[:count])
        goes = self._wait_patiently(
            lambda: self._has_credit() and self._has_room(len(self._own(pool, count))),
            lambda: (
                (self._has_credit() or self._is_confirming())
                and (self._has_room(len(self._own(pool, count))) or self._more_comes())
            ),
        )
        # From here on nothing comes in: what is read is what is given.
        own, batch = self._own(pool, count), self.rows.read(slots)
        if self.downstream is None:
            if self.rows.unplaced and len(own):  # what has no slot gets its turn
                self.rows.unplaced.append(Parcel(self.rows.take_out(own)))
                self._place()
        elif goes and len(own):
            self._give(own)
        elif count > 0:
            self.late_rounds += 1
            # If a neighbour has entered a drain, all ranks are made even there.
            self._is_uneven |= self._more_comes() and self._is_confirming()
        return batch

    def fetch(self, slots: Int[np.ndarray, " row"]) -> bool:
        """Whether all rows in some slots are this rank's; awaits those that are due."""
        if self.rows.held[slots].all():
            return True
        self.poll()
        return self._wait_patiently(lambda: bool(self.rows.held[slots].all()), self._more_comes)

    def poll(self) -> None:
        """Accepts what has come."""
        self._receive(0.0)

    def drain(self, timeout_seconds: float) -> None:
        """Returns when nothing is in flight here and, if all ranks are there, all are even.

        A collective, in which only neighbours talk. Ranks that have given fewer rows than the one
        that gave most catch up, so that every shard has its size again.

        Raises:
            GossipError: A rank did not come in time; what is in flight stays so.
        """
        number = self._drains = self._drains + 1
        self._is_draining = True
        self._ahead.clear()
        totals = np.full(self.world_size, _UNKNOWN)
        totals[self.rank] = self.rows_out
        self._totals.setdefault(number, np.full(self.world_size, _UNKNOWN))
        self._learn(number, totals)
        if (peer := self.upstream) is not None:  # it waits for no confirmation any more
            self._say(peer, Kind.FENCE, epoch=number, bucket=1)
        try:
            if not self._wait(lambda: self._is_even(number), timeout_seconds):
                missing = np.flatnonzero(self._totals[number] < 0).tolist()
                what = f"ranks {missing} to call drain()" if missing else "rows to be confirmed"
                raise GossipError(
                    f"rank {self.rank} waited {timeout_seconds:g} s for {what}: every rank calls "
                    "drain(), equally often"
                )
            self._drained = number
            self._is_even_now, self._is_uneven = True, False
        finally:
            self._is_draining = False
            del self._totals[number]

    def close(self, linger_seconds: float) -> None:
        """Leaves, and waits at most `linger_seconds` to hear who has what was in flight; local."""
        self.poll()
        self._is_leaving = True
        for peer in {
            (self.rank + sign * step) % self.world_size
            for step in range(1, min(_NOTIFIED, self.world_size - 1) + 1)
            for sign in (-1, 1)
        } - {*self.gone}:
            self._say(peer, Kind.LEAVE, round=self._arrived[peer], epoch=self._drained)
        self._wait(lambda: not self.in_flight, linger_seconds)
        if left := sum(map(len, self.in_flight)):
            logger.info("rank %d left with %d rows still on their way", self.rank, left)
        self.transport.close(min(_LAST_WORD_SECONDS, linger_seconds))

    # Giving.

    def _own(self, pool: Int[np.ndarray, " slot"], count: int) -> Int[np.ndarray, " own"]:
        """The first `count` slots whose rows can be given; one row always stays."""
        first = pool[np.sort(np.unique(pool, return_index=True)[1])]
        return first[self.rows.held[first]][: min(count, self.rows.slots - 1)]

    def _has_room(self, count: int) -> bool:
        """Whether so many more slots may be vacant."""
        most = min(self._credits * self._most_rows, self.rows.slots - 1)
        return len(self.rows.vacant) + count <= most

    def _has_credit(self) -> bool:
        peer = self.downstream
        return peer is not None and len(self._unconfirmed[peer]) < self._credits

    def _give(self, slots: Int[np.ndarray, " slot"]) -> None:
        start = time.perf_counter()
        self._send(self.rows.take_out(slots))
        self.moving_seconds += time.perf_counter() - start
        self._place()

    def _send(self, rows: Packed) -> None:
        """Sends rows; they stay in memory until they are confirmed."""
        peer = self.downstream
        assert peer is not None
        self._is_even_now = False
        self._sent[peer] += 1
        self._unconfirmed[peer].append((self._sent[peer], rows))
        self.rows_out += len(rows)
        self.bytes_sent += rows.nbytes
        self._say(
            peer,
            Kind.DATA,
            round=self._sent[peer],
            bucket=len(rows),
            epoch=int(self._is_uneven),
            generation=self._drains - self._is_draining,
            payload=rows.flatten(),
        )

    def _pass_on(self) -> None:
        """Sends on at once what this rank has too much of, if rounds were left out somewhere.

        It has fallen behind then, and the rows are missing elsewhere. Otherwise the others are only
        a few steps ahead, and each row gets its turn.
        """
        if self._is_uneven and self.rows.unplaced_count > self._most_rows:
            while self.rows.unplaced and self._has_credit():
                parcel = self.rows.unplaced.popleft()
                self._send(parcel.rows)
                self._confirm(parcel)

    # Waiting.

    def _wait_patiently(self, ready: Callable[[], bool], may_come: Callable[[], bool]) -> bool:
        if ready():
            return True
        if self._deadline_seconds == 0 or not self._is_patient:
            return False
        start = time.perf_counter()
        self._wait(lambda: ready() or not may_come(), self._deadline_seconds)
        self.exposed_seconds += time.perf_counter() - start
        if not (is_ready := ready()) and may_come():
            self._is_patient = False
            logger.warning("rank %d: a neighbour is late; its rows stay as they are", self.rank)
        return is_ready

    def _more_comes(self) -> bool:
        """Whether there is an upstream rank that has not entered the next drain."""
        upstream, totals = self.upstream, self._totals.get(self._drains + 1)
        return upstream is not None and (totals is None or bool(totals[upstream] == _UNKNOWN))

    def _is_confirming(self) -> bool:
        """Whether there is a downstream rank that has not entered the next drain."""
        peer = self.downstream
        return peer is not None and self._drain_of[peer] <= self._drains

    def _wait(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.perf_counter() + timeout_seconds
        while not (is_ready := ready()) and (left := deadline - time.perf_counter()) > 0:
            self._receive(left)
        return is_ready

    # Receiving.

    def _receive(self, timeout_seconds: float) -> None:
        early, self._early = self._early, []
        wait_seconds = 0.0 if early and not self._is_draining else timeout_seconds
        for event in (*early, *self.transport.receive(wait_seconds)):
            try:
                self._handle(event)
            except WireError as error:
                self.refused += 1
                logger.debug("rank %d dropped a message: %s", self.rank, error)
        self._place()
        if len(self.in_flight) <= self._credits // 2 and not self.rows.vacant:
            self._is_patient = True

    def _handle(self, event: Received | Lost) -> None:
        if isinstance(event, Lost):
            peer, header = event.peer, None
        else:
            header = Header.unpack(event.header)
            peer = header.sender
            if header.run != self._run:
                raise WireError("it belongs to another run")
            if header.kind is Kind.DATA and header.generation >= self._drains:
                self._ahead.add(peer)
        if self._is_draining and peer in self._ahead:
            self._early.append(event)  # it has ended this drain: what it sends comes after that
        elif header is None or isinstance(event, Lost):
            self._lose(peer, None)
        else:
            self._accept(header, event.payload)

    def _accept(self, header: Header, payload: Tensor | None) -> None:
        peer = header.sender
        if not 0 <= peer < self.world_size or peer == self.rank or peer in self.gone:
            raise WireError(f"rank {peer} is no neighbour, or gone")
        is_notice = header.kind is Kind.FENCE and header.bucket == 1
        sizes = {Kind.DATA: header.bucket * self.rows.row_bytes, Kind.FENCE: 8 * self.world_size}
        size_bytes = 0 if is_notice else sizes.get(header.kind, 0)
        if (0 if payload is None else payload.numel()) != size_bytes:
            raise WireError(f"the wrong number of bytes for {header.kind.name}")
        if header.kind is Kind.DATA:
            self._accept_rows(header, payload)
        elif header.kind is Kind.VOID:
            self._drop_confirmed(peer, header.round)
        elif header.kind is Kind.LEAVE:
            self._lose(peer, header)
        elif is_notice:
            self._drain_of[peer] = header.epoch
        elif header.kind is Kind.FENCE and payload is not None:
            self._learn(header.epoch, np.frombuffer(payload.numpy().tobytes(), dtype=np.int64))

    def _accept_rows(self, header: Header, payload: UInt8[Tensor, " byte"] | None) -> None:
        peer, count = header.sender, header.bucket
        if not 1 <= count <= self._most_rows:
            raise WireError(f"{count} rows, at most {self._most_rows} travel together")
        if header.round != self._arrived[peer] + 1:
            raise WireError(f"parcel {header.round} came after parcel {self._arrived[peer]}")
        if self._is_leaving:
            return  # they are their sender's again, which hears that this rank leaves
        self._arrived[peer] += 1
        self._is_uneven |= header.epoch == 1
        self.rows_in += count
        body = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        self.bytes_received += body.nbytes
        rows = body.view(count, self.rows.row_bytes)
        self.rows.unplaced.append(Parcel(rows, peer, header.round))

    def _place(self) -> None:
        start = time.perf_counter()
        placed = self.rows.place()
        for parcel in placed:
            self._confirm(parcel)
        if placed:
            self.moving_seconds += time.perf_counter() - start

    def _confirm(self, parcel: Parcel) -> None:
        if parcel.sender is not None and parcel.sender not in self.gone:
            self._say(parcel.sender, Kind.VOID, round=parcel.number)
        parcel.sender = None

    def _drop_confirmed(self, peer: int, number: int) -> None:
        link = self._unconfirmed[peer]
        while link and link[0][0] <= number:
            link.popleft()

    # Drains.

    def _learn(self, number: int, totals: Int[np.ndarray, " rank"]) -> None:
        """Keeps what ranks had given away when they came to a drain, and tells the next."""
        if number <= self._drains and number not in self._totals:
            return  # it is over
        before = self._totals.get(number, np.full(self.world_size, _UNKNOWN))
        self._totals[number] = np.maximum(before, totals)
        if (self._totals[number] != before).any():
            self._tell(number)

    def _tell(self, number: int) -> None:
        if (peer := self.downstream) is not None:
            payload = torch.from_numpy(self._totals[number]).view(torch.uint8)
            self._say(peer, Kind.FENCE, epoch=number, payload=payload)

    def _is_even(self, number: int) -> bool:
        for rank in self.gone:
            if self._drained_by.get(rank, 0) < number:  # else it was even before it left
                totals = np.full(self.world_size, _UNKNOWN)
                totals[rank] = _GONE
                self._learn(number, totals)
        totals = self._totals[number]
        if (totals == _UNKNOWN).any():
            return False
        if (totals == _GONE).any():  # sizes stay; all that was on its way here has arrived
            for parcel in self.rows.unplaced:
                self._confirm(parcel)
        else:
            most = int(totals.max())
            self._catch_up(most)
            if self.rows_out < most or self.rows_in < most:
                return False
        return not self.in_flight

    def _catch_up(self, most: int) -> None:
        while self.rows_out < most:
            count = min(self._most_rows, most - self.rows_out, self.rows.slots - 1)
            slots = np.flatnonzero(self.rows.held)[:count]
            if not (len(slots) and self._has_credit() and self._has_room(len(slots))):
                return
            self._give(slots)

    # Who is there.

    def _lose(self, peer: int, leave: Header | None) -> None:
        """A rank is gone: it left, with this message, or it died (None)."""
        if peer in self.gone:
            self.transport.forget(peer)
            return
        was_upstream = peer == self.upstream
        if leave is not None:
            self._drop_confirmed(peer, leave.round)
        rows = [rows for _, rows in self._unconfirmed.pop(peer, ())]
        count = sum(map(len, rows))
        if leave is None:
            self.gone[peer] = "died"
            self.rows_lost += count
            self.transport.forget(peer)
        else:
            self.gone[peer], self._drained_by[peer] = "left", leave.epoch
            self.rows_out -= count
            self.rows.unplaced.extendleft(Parcel(part) for part in reversed(rows))
            if not self._is_leaving:  # all that it has sent is here
                self._say(peer, Kind.VOID, round=self._arrived[peer])
        lost = f", and {count} rows on their way to it are lost" if leave is None and count else ""
        level = logging.WARNING if leave is None else logging.INFO
        how = self.gone[peer]
        logger.log(level, "rank %d: rank %d %s%s; the ring closes", self.rank, peer, how, lost)
        if was_upstream:
            self.rows.write_off()
        self._place()
        if not self._is_leaving:
            self._open()
            for number in self._totals:
                self._tell(number)

    def _open(self) -> None:
        """Makes the links to both neighbours ready, and watches that they live."""
        for peer in (self.downstream, self.upstream):
            if peer is not None:
                self.transport.open(peer)

    def _next(self, step: int) -> int | None:
        for distance in range(1, self.world_size):
            peer = (self.rank + step * distance) % self.world_size
            if peer not in self.gone:
                return peer
        return None

    def _say(
        self,
        peer: int,
        kind: Kind,
        *,
        round: int = 0,
        bucket: int = 0,
        epoch: int = 0,
        generation: int = 0,
        payload: UInt8[Tensor, " byte"] | None = None,
    ) -> None:
        header = Header(
            kind=kind,
            run=self._run,
            sender=self.rank,
            round=round,
            bucket=bucket,
            epoch=epoch,
            generation=generation,
            size_bytes=0 if payload is None else payload.nbytes,
        )
        self.transport.send(peer, header.pack(), payload)
