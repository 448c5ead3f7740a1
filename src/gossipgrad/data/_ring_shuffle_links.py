"""The links of a ring: parcels on their way to and from other ranks, and who is gone."""

import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxtyping import UInt8
from torch import Tensor

from gossipgrad.comm import Header, Kind, Lost, Received, Transport, WireError

from ._ring_shuffle_rows import Parcel, RowFormat

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Outgoing:
    """Parcels towards one rank; they are numbered from 1.

    Attributes:
        number: Of the last parcel.
        unconfirmed: Those that the rank has not said to have taken, with their numbers.
    """

    number: int = 0
    unconfirmed: deque[tuple[int, Parcel]] = field(default_factory=deque)

    def confirm(self, number: int) -> None:
        """The rank has taken everything up to parcel `number`."""
        while self.unconfirmed and self.unconfirmed[0][0] <= number:
            self.unconfirmed.popleft()


@dataclass(slots=True, eq=False)
class Incoming:
    """Parcels from one rank.

    Attributes:
        arrived: Number of the last that came.
        taken: Number of the last whose rows are ours.
        due: Number of the last that was sent before the rank came to a settlement, by settlement.
        waiting: Those that came and are not taken; their rows are still on their way.
    """

    arrived: int = 0
    taken: int = 0
    due: dict[int, int] = field(default_factory=dict)
    waiting: deque[Parcel] = field(default_factory=deque)


class Links:
    """What this rank says to others and hears from them.

    The headers are those of all links: `DATA` brings `bucket` rows as parcel number `round`, with
    `epoch` 1 if rounds were left out; `NOTE` says that everything up to parcel `round` was taken;
    `SETTLE` says that rank `bucket` had given away `round` rows when it came to settlement `epoch`;
    `LEAVE` says that nothing past parcel `round` will be taken, and nothing more comes, after
    `epoch` settlements. Whatever does not fit is dropped and counted; a parcel that is dropped is
    never confirmed, and so stays its sender's.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that tell this ring's messages from all others.
        rows: What a row is.
        most_rows: Rows in the largest parcel.
    """

    def __init__(
        self, transport: Transport, *, run: bytes, rows: RowFormat, most_rows: int
    ) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.outgoing: defaultdict[int, Outgoing] = defaultdict(Outgoing)
        self.incoming: defaultdict[int, Incoming] = defaultdict(Incoming)
        self.gone: dict[int, str] = {}
        self.bytes_sent = self.bytes_received = 0
        self.refused = 0
        self.transport = transport
        self._run = run
        self._rows = rows
        self._most_rows = most_rows

    @property
    def downstream(self) -> int | None:
        """Who gets this rank's rows: the next below that is not gone, None if all are."""
        return self._next(-1)

    @property
    def upstream(self) -> int | None:
        """Whose rows come here: the next above that is not gone."""
        return self._next(1)

    @property
    def in_flight(self) -> Sequence[Parcel]:
        """What was given away and not confirmed."""
        return [parcel for link in self.outgoing.values() for _, parcel in link.unconfirmed]

    @property
    def parcels(self) -> Sequence[Parcel]:
        """All that is on its way from here or to here."""
        waiting = [parcel for link in self.incoming.values() for parcel in link.waiting]
        return [*self.in_flight, *waiting]

    def around(self, distance: int) -> set[int]:
        """The ranks at most so far away, on either side, that are not gone."""
        steps = range(1, min(distance, self.world_size - 1) + 1)
        peers = {(self.rank + sign * step) % self.world_size for step in steps for sign in (-1, 1)}
        return peers - set(self.gone)

    def open(self) -> None:
        """Makes the links to both neighbours ready, and watches that they live."""
        for peer in (self.downstream, self.upstream):
            if peer is not None:
                self.transport.open(peer)

    def events(self, timeout_seconds: float) -> Iterator[Header | Lost]:
        """What has come; parcels are laid into `incoming` before their header is told."""
        for event in self.transport.receive(timeout_seconds):
            if isinstance(event, Lost):
                yield event
                continue
            try:
                header = self._read(event)
            except WireError as error:
                self.refused += 1
                logger.debug("rank %d dropped a message: %s", self.rank, error)
                continue
            yield header

    def send_parcel(self, peer: int, parcel: Parcel, *, is_uneven: bool) -> None:
        """Sends rows; they stay in memory until they are confirmed."""
        link = self.outgoing[peer]
        link.number += 1
        link.unconfirmed.append((link.number, parcel))
        self.bytes_sent += parcel.payload.nbytes
        self.say(
            peer,
            Kind.DATA,
            round=link.number,
            bucket=parcel.count,
            epoch=int(is_uneven),
            payload=parcel.payload,
        )

    def say(
        self,
        peer: int,
        kind: Kind,
        *,
        round: int,
        bucket: int = 0,
        epoch: int = 0,
        payload: UInt8[Tensor, " byte"] | None = None,
    ) -> None:
        """Sends a message."""
        header = Header(
            kind=kind,
            run=self._run,
            sender=self.rank,
            round=round,
            bucket=bucket,
            epoch=epoch,
            size_bytes=0 if payload is None else payload.nbytes,
        )
        self.transport.send(peer, header.pack(), payload)

    def _next(self, step: int) -> int | None:
        for distance in range(1, self.world_size):
            peer = (self.rank + step * distance) % self.world_size
            if peer not in self.gone:
                return peer
        return None

    def _read(self, arrival: Received) -> Header:
        header = Header.unpack(arrival.header)
        if header.run != self._run:
            raise WireError("it belongs to another run")
        if not 0 <= header.sender < self.world_size or header.sender == self.rank:
            raise WireError(f"rank {header.sender} is no neighbour")
        if header.sender in self.gone:
            raise WireError(f"rank {header.sender} is gone")
        if header.kind is Kind.FENCE and header.bucket >= self.world_size:
            raise WireError(f"there is no rank {header.bucket}")
        if header.kind is Kind.DATA:
            self._lay_down(header, arrival.payload)
        elif arrival.payload is not None:
            raise WireError(f"a {header.kind.name} message carries no payload")
        return header

    def _lay_down(self, header: Header, payload: Tensor | None) -> None:
        if not 1 <= header.bucket <= self._most_rows:
            raise WireError(f"{header.bucket} rows, at most {self._most_rows} travel together")
        if payload is None or payload.numel() != self._rows.size_bytes(header.bucket):
            raise WireError(f"the wrong number of bytes for {header.bucket} rows")
        link = self.incoming[header.sender]
        if header.round != link.arrived + 1:
            raise WireError(f"parcel {header.round} came after parcel {link.arrived}")
        link.arrived += 1
        link.waiting.append(Parcel(payload, header.bucket))
        self.bytes_received += payload.nbytes
