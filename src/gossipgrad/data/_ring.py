"""The ring: rows go to rank - 1 and come from rank + 1, and each belongs to one rank.

What becomes of the rows of one batch, at their sender (above) and their receiver (below)::

    in a slot --DATA--> unconfirmed -----------VOID-----------> gone
                             | receiver leaves: back, receiver dies: lost
    waiting <--DATA--   -> in a slot --VOID-->
"""

import logging
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Collection

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gossipgrad.comm import Header, Kind, Lost, Received, Transport, WireError

from ._rows import Packed, Parcel, Rows

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 2.0  # until the others have read LEAVE
_NOTIFIED = 8  # ranks on either side of one that leaves: its neighbours may leave with it
_POLL_SECONDS = 0.05


class Ring:
    """One rank's part of the ring; never a collective, and no step waits."""

    # A row belongs to exactly one rank, and passes on when it arrives. The receiver puts it into
    # the slot of the row that it gave away longest ago, and confirms a parcel once all its rows
    # have a slot. A sender keeps what is unconfirmed, at most `credits` parcels: it comes back if
    # the receiver leaves. What a dead rank held, or was on its way to it, is lost and counted.
    # Headers: DATA brings `bucket` rows as parcel number `round`; VOID confirms everything up to
    # parcel `round`; LEAVE says that nothing past it is accepted and nothing more comes.

    def __init__(
        self,
        transport: Transport,
        rows: Rows,
        *,
        run: bytes,
        credits: int,
        most_rows: int,
        members: Collection[int],
    ) -> None:
        self.transport, self.rows = transport, rows
        # The links of a ring that nobody closed end with it.
        weakref.finalize(self, transport.close).atexit = False  # pyrefly: ignore[missing-attribute]
        self.rank, self.world_size = transport.rank, transport.world_size
        self.gone = {rank for rank in range(self.world_size) if rank not in members}
        self.rows_out = self.rows_in = self.rows_lost = 0
        self.bytes_sent = self.bytes_received = 0
        self.late_rounds = self.refused = 0
        self.moving_seconds = 0.0
        self._run, self._credits, self._most_rows = run, credits, most_rows
        self._is_leaving = False
        self._sent: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._unconfirmed: defaultdict[int, deque[tuple[int, Packed]]] = defaultdict(deque)
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
        waiting = [parcel.rows for parcel in self.rows.waiting]
        return sum(rows.nbytes for rows in (*self.in_flight, *waiting))

    def hand_out(
        self, slots: Int[np.ndarray, " row"], count: int, before: Int[np.ndarray, " used"]
    ) -> Packed:
        """The rows in some slots; the first `count` that are this rank's are given away with it."""
        # They stay, and the round is late, if the credits are used up. Where `count` is more than
        # there are, rows in the slots of the batches `before` go along.
        self._pass_on()
        batch = self.rows.read(slots)
        pool = slots if count <= len(slots) else np.concatenate([slots, before])
        own = self._own(pool, count)
        if self.downstream is None:
            if self.rows.waiting and len(own):  # what has no slot gets its turn
                self.rows.waiting.append(Parcel(self.rows.take_out(own)))
                self._fill_slots()
        elif len(own) and self._has_credit() and self._has_room(len(own)):
            start = time.perf_counter()
            self._send(self.rows.take_out(own))
            self.moving_seconds += time.perf_counter() - start
            self._fill_slots()
        elif count > 0:
            self.late_rounds += 1
        return batch

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Accept what has come."""
        for event in self.transport.receive(timeout_seconds):
            try:
                self._handle(event)
            except WireError as error:
                self.refused += 1
                logger.debug("rank %d dropped a message: %s", self.rank, error)
        self._fill_slots()

    def close(self, linger_seconds: float) -> None:
        """Leave, and wait at most `linger_seconds` to learn which rows in flight have arrived."""
        self.poll()
        self._is_leaving = True
        for distance in range(1, min(_NOTIFIED, self.world_size - 1) + 1):
            for peer in {(self.rank + sign * distance) % self.world_size for sign in (-1, 1)}:
                if peer not in self.gone:
                    self._send_message(peer, Kind.LEAVE, round=self._arrived[peer])
        deadline = time.monotonic() + linger_seconds
        while self.in_flight and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, _POLL_SECONDS))
        if count := sum(map(len, self.in_flight)):
            logger.info("rank %d left with %d rows still in flight", self.rank, count)
        self.transport.close(min(_LINGER_SECONDS, linger_seconds))

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

    def _send(self, rows: Packed) -> None:
        """Send rows; they stay in memory until they are confirmed."""
        peer = self.downstream
        assert peer is not None
        self._sent[peer] += 1
        self._unconfirmed[peer].append((self._sent[peer], rows))
        self.rows_out += len(rows)
        self.bytes_sent += rows.nbytes
        number = self._sent[peer]
        self._send_message(peer, Kind.DATA, round=number, bucket=len(rows), payload=rows.flatten())

    def _pass_on(self) -> None:
        """Send on at once what has waited here for half of the credits."""
        # This rank has fallen behind then, and the rows are missing elsewhere.
        while len(self.rows.waiting) > max(1, self._credits // 2) and self._has_credit():
            parcel = self.rows.waiting.popleft()
            self._send(parcel.rows)
            self._confirm(parcel)

    # Receiving.

    def _handle(self, event: Received | Lost) -> None:
        if isinstance(event, Lost):
            self._lose(event.peer, None)
            return
        header = Header.unpack(event.header)
        peer, payload = header.sender, event.payload
        if header.run != self._run:
            raise WireError("it belongs to another run")
        if not 0 <= peer < self.world_size or peer == self.rank or peer in self.gone:
            raise WireError(f"rank {peer} is no neighbour, or gone")
        size_bytes = header.bucket * self.rows.row_bytes if header.kind is Kind.DATA else 0
        if (0 if payload is None else payload.numel()) != size_bytes:
            raise WireError(f"the wrong number of bytes for {header.kind.name}")
        if header.kind is Kind.DATA:
            self._accept_rows(header, payload)
        elif header.kind is Kind.VOID:
            self._drop_confirmed(peer, header.round)
        elif header.kind is Kind.LEAVE:
            self._lose(peer, header)

    def _accept_rows(self, header: Header, payload: UInt8[Tensor, " byte"] | None) -> None:
        peer, count = header.sender, header.bucket
        if not 1 <= count <= self._most_rows:
            raise WireError(f"{count} rows, at most {self._most_rows} travel together")
        if header.round != self._arrived[peer] + 1:
            raise WireError(f"parcel {header.round} came after parcel {self._arrived[peer]}")
        if self._is_leaving:
            return  # they are their sender's again, which learns that this rank leaves
        self._arrived[peer] += 1
        self.rows_in += count
        body = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        self.bytes_received += body.nbytes
        rows = body.view(count, self.rows.row_bytes)
        self.rows.waiting.append(Parcel(rows, peer, header.round))

    def _fill_slots(self) -> None:
        start = time.perf_counter()
        if filled := self.rows.fill_slots():
            for parcel in filled:
                self._confirm(parcel)
            self.moving_seconds += time.perf_counter() - start

    def _confirm(self, parcel: Parcel) -> None:
        if parcel.sender is not None and parcel.sender not in self.gone:
            self._send_message(parcel.sender, Kind.VOID, round=parcel.number)
        parcel.sender = None

    def _drop_confirmed(self, peer: int, number: int) -> None:
        link = self._unconfirmed[peer]
        while link and link[0][0] <= number:
            link.popleft()

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
        self.gone.add(peer)
        if leave is None:
            self.rows_lost += count
            self.transport.forget(peer)
            lost = f", and {count} rows in flight to it are lost" if count else ""
            logger.warning("rank %d: rank %d died%s; the ring closes", self.rank, peer, lost)
        else:
            self.rows_out -= count
            self.rows.waiting.extendleft(Parcel(part) for part in reversed(rows))
            if not self._is_leaving:  # all that it has sent is here
                self._send_message(peer, Kind.VOID, round=self._arrived[peer])
            logger.info("rank %d: rank %d left; the ring closes", self.rank, peer)
        if was_upstream:
            self.rows.write_off()
        self._fill_slots()
        if not self._is_leaving:
            self._open()

    def _open(self) -> None:
        """Make the links to both neighbours ready, and watch that they live."""
        for peer in (self.downstream, self.upstream):
            if peer is not None:
                self.transport.open(peer)

    def _next(self, step: int) -> int | None:
        for distance in range(1, self.world_size):
            peer = (self.rank + step * distance) % self.world_size
            if peer not in self.gone:
                return peer
        return None

    def _send_message(
        self,
        peer: int,
        kind: Kind,
        *,
        round: int,
        bucket: int = 0,
        payload: UInt8[Tensor, " byte"] | None = None,
    ) -> None:
        header = Header(
            kind=kind,
            run=self._run,
            sender=self.rank,
            round=round,
            bucket=bucket,
            epoch=0,
            generation=0,
            size_bytes=0 if payload is None else payload.nbytes,
        )
        self.transport.send(peer, header.pack(), payload)
