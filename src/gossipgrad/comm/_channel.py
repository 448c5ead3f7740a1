"""A channel: the protocol of exchanges, over any transport."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Outcome
from gossipgrad.comm._sender import DeferredSender
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket, Transport
from gossipgrad.comm._wire import MAX_VOIDED, Header, Kind, WireError

__all__ = ["Channel", "Part"]

logger = logging.getLogger(__name__)

_EARLY_ROUNDS = 16  # how far ahead of us a partner's parts are kept
_LEAVE_SECONDS = 0.2  # for the last word; a peer that misses it sees the link go down
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that Ctrl-C and silent deaths are seen


@dataclass(frozen=True, slots=True)
class Part:
    """What the plan says of one bucket: element type and count."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the bucket on the wire."""
        return self.numel * self.dtype.itemsize


class Channel:
    """Exchanges buckets with partners, one round after the other; the rules of DESIGN's links.

    An exchange counts iff both ends sent their part. A rank gives a round up (voids it) only
    before sending, and names it in the next header on that link. What is received is checked
    against the plan before it is kept: run, generation, sender, bucket, dtype and size; anything
    else is dropped and counted in `refused`.

    When a peer is late, `take` returns `LATE` at the deadline and the exchange stays open. When it
    died or left, its open exchanges end as `DEAD_PEER`; no call raises for it.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that tell this run's messages from all others.
        plan: dtype and size of each bucket, equal on all ranks.
        credits: Rounds that may be open on one link; a further one is void at once. This bounds
            the memory: `credits + 1` snapshots.
        generation: The membership this rank lives in; messages of another are void.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: bytes,
        plan: Sequence[Part],
        credits: int = 1,
        generation: int = 0,
    ) -> None:
        if len(run) != 16:
            raise ValueError(f"run must be 16 bytes, got {len(run)}: use secrets.token_bytes(16)")
        if credits < 1:
            raise ValueError(f"credits must be at least 1, got {credits}")
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.plan = tuple(plan)
        self.credits = credits
        self.generation = generation
        self.refused = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._transport = transport
        self._sender = DeferredSender(transport)
        self._run = run
        self._lock = threading.RLock()
        self._receiving = threading.Lock()
        self._open: dict[tuple[int, int, int], Exchange] = {}
        self._early: dict[tuple[int, int, int], Tensor] = {}
        self._given_up: dict[int, set[int]] = defaultdict(set)
        self._voided_by: dict[int, set[int]] = defaultdict(set)
        self._settled: dict[int, tuple[int, int]] = {}
        self._gone: dict[int, str] = {}
        self._linked: set[int] = set()
        self._tickets: list[tuple[int, Ticket]] = []
        self._last_round = -1
        self._epoch = 0
        self._closed = False

    @property
    def last_round(self) -> int:
        """The highest round that was posted, -1 before the first."""
        return self._last_round

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, with which of the two."""
        with self._lock:
            return dict(self._gone)

    def post(
        self,
        round: int,
        bucket: int,
        payload: Tensor,
        *,
        send_to: int | None,
        recv_from: int | None,
        ready: Callable[[], None] | None = None,
    ) -> Exchange:
        """Sends this rank's part of a bucket and awaits the partner's; returns at once.

        Args:
            round: The round; on one link, rounds are posted in rising order.
            bucket: Index into the plan.
            payload: Flat, contiguous, in host memory, as the plan says. It must not be written
                before `exchange.ticket.done`.
            send_to: Who gets this part, None for no one.
            recv_from: Whose part is awaited, None for no one.
            ready: Called in a background thread before sending; returns when `payload` is filled
                (a copy from an accelerator, say).

        Raises:
            ValueError: If the payload does not fit the plan.
        """
        part = self.plan[bucket]
        if payload.dtype != part.dtype or payload.numel() != part.numel:
            raise ValueError(
                f"bucket {bucket} is planned as {part.numel} x {part.dtype}, "
                f"got {payload.numel()} x {payload.dtype}"
            )
        exchange = Exchange(round, bucket, send_to, recv_from)
        with self._lock:
            self._last_round = max(self._last_round, round)
            if recv_from is not None:
                self._drop_early(recv_from, before=round)
                early = self._early.pop((recv_from, round, bucket), None)
                refusal = None if early is not None else self._why_not(recv_from, round)
                if refusal is not None:
                    exchange.finish(refusal)
                    if send_to != recv_from or refusal is Outcome.DEAD_PEER:
                        self._send_part(exchange, payload, ready)
                    elif round not in self._voided_by[recv_from]:
                        self._give_up(send_to, round)
                    return exchange
                if early is not None:
                    exchange.finish(Outcome.DELIVERED, early)
                else:
                    self._open[recv_from, round, bucket] = exchange
                    self._transport.open(recv_from)
                    self._linked.add(recv_from)
            self._send_part(exchange, payload, ready)
            if recv_from is None:
                exchange.finish(Outcome.DELIVERED)
        return exchange

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Waits for the partner's part, at most `timeout_seconds`; `LATE` leaves it open."""
        self.poll()
        deadline = time.perf_counter() + timeout_seconds
        while exchange.open:
            left = deadline - time.perf_counter()
            if left <= 0:
                break
            self.poll(min(left, _WAKE_SECONDS))
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Takes in what has come; waits for the first message at most `timeout_seconds`."""
        if self._closed:
            return
        with self._receiving:
            events = self._transport.receive(timeout_seconds)
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, "was lost")
                    else:
                        self._accept(event)

    def cancel(self, exchange: Exchange) -> None:
        """Gives up an open exchange; the partner's part is dropped should it come."""
        with self._lock:
            if exchange.open:
                assert exchange.recv_from is not None
                del self._open[exchange.recv_from, exchange.round, exchange.bucket]
                self._given_up[exchange.recv_from].add(exchange.round)
                exchange.finish(Outcome.VOID)

    def void(self, round: int, send_to: int | None) -> None:
        """Gives a round up before anything of it was sent, and tells `send_to`."""
        with self._lock:
            self._give_up(send_to, round)

    def replan(self, plan: Sequence[Part]) -> None:
        """Goes on with other buckets; nothing may be open, and all ranks do it between rounds."""
        with self._lock:
            assert not self._open, "exchanges are open"
            self.plan = tuple(plan)

    def settle(self) -> None:
        """Tells everyone that nothing past the last posted round comes before `resume`.

        Partners that are rounds ahead then see those rounds as void instead of waiting for us.
        """
        with self._lock:
            self._announce(Kind.SETTLE, range(self.world_size))

    def resume(self, last_rounds: Sequence[int], next_round: int) -> None:
        """Ends what `settle` began, once all ranks came together.

        Args:
            last_rounds: The last round that each rank has posted; what is open past it is void.
            next_round: Where rounds go on, equal on all ranks.
        """
        with self._lock:
            self._epoch += 1
            for peer, last_round in enumerate(last_rounds):
                self._resolve(peer, lambda round, last=last_round: round > last, Outcome.VOID)
                self._drop_early(peer, before=next_round)

    def close(self, linger_seconds: float = 2.0) -> None:
        """Says LEAVE on every link and closes; open exchanges end as `VOID`; local.

        What was posted is sent on for at most `linger_seconds`; no one is awaited.
        """
        if self._closed:
            return
        for exchange in list(self._open.values()):
            self.cancel(exchange)
        deadline = time.perf_counter() + linger_seconds
        self.poll()
        while not self._all_sent() and time.perf_counter() < deadline:
            self.poll(0.005)
        self._sender.drain(max(0.0, deadline - time.perf_counter()))
        with self._lock:
            self._announce(Kind.LEAVE, self._linked)
            self._closed = True
        with self._receiving:
            self._transport.close(min(_LEAVE_SECONDS, linger_seconds))

    def _all_sent(self) -> bool:
        self._tickets = [(peer, t) for peer, t in self._tickets if not t.done]
        return all(peer in self._gone for peer, _ in self._tickets)

    def _header(self, kind: Kind, *, round: int, to: int, bucket: int = 0) -> Header:
        part = self.plan[bucket] if kind is Kind.DATA else None
        voided = ()
        if kind is Kind.NOTE:
            voided = tuple(sorted(self._given_up[to])[-MAX_VOIDED:])
        return Header(
            kind=kind,
            run=self._run,
            sender=self.rank,
            generation=self.generation,
            round=round,
            epoch=self._epoch + 1,
            bucket=bucket,
            dtype=None if part is None else part.dtype,
            size_bytes=0 if part is None else part.size_bytes,
            voided=voided,
        )

    def _send_part(
        self, exchange: Exchange, payload: Tensor, ready: Callable[[], None] | None
    ) -> None:
        peer = exchange.send_to
        if peer is None or peer in self._gone:
            exchange.ticket = Sent()
            return
        header = self._header(Kind.DATA, round=exchange.round, to=peer, bucket=exchange.bucket)
        exchange.ticket = self._sender.send(peer, header.pack(), payload, ready)
        self._linked.add(peer)
        self._tickets = [(to, t) for to, t in self._tickets if not t.done]
        self._tickets.append((peer, exchange.ticket))
        self.bytes_sent += header.size_bytes

    def _give_up(self, peer: int | None, round: int) -> None:
        """Voids a round towards `peer`, before any part of it was sent, and names it at once."""
        if peer is None or peer in self._gone or round in self._given_up[peer]:
            return
        self._given_up[peer].add(round)
        note = self._header(Kind.NOTE, round=round, to=peer)
        self._sender.send(peer, note.pack(), None, None)

    def _why_not(self, peer: int, round: int) -> Outcome | None:
        """Why a round with `peer` cannot be, or None if it can."""
        if peer in self._gone:
            return Outcome.DEAD_PEER
        epoch, settled_round = self._settled.get(peer, (0, 0))
        if round in self._voided_by[peer] or (epoch > self._epoch and round > settled_round):
            return Outcome.VOID
        if round in self._given_up[peer]:
            return Outcome.VOID
        rounds = {key[1] for key in self._open if key[0] == peer} - {round}
        return Outcome.VOID if len(rounds) >= self.credits else None

    def _announce(self, kind: Kind, peers: Iterable[int]) -> None:
        for peer in set(peers) - {self.rank, *self._gone}:
            header = self._header(kind, round=self._last_round, to=peer)
            self._sender.send(peer, header.pack(), None, None)
            self._linked.add(peer)

    def _accept(self, arrival: Arrival) -> None:
        try:
            header = Header.unpack(arrival.header)
            self._check(header, arrival.payload)
        except WireError as error:
            self.refused += 1
            logger.debug("rank %d dropped a message: %s", self.rank, error)
            return
        peer = header.sender
        if header.voided:
            self._voided_by[peer].update(header.voided)
            self._resolve(peer, lambda round: round in header.voided, Outcome.VOID)
        if header.kind is Kind.DATA:
            assert arrival.payload is not None
            self._deliver(header, arrival.payload)
        elif header.kind is Kind.SETTLE:
            self._settled[peer] = (header.epoch, header.round)
            if header.epoch > self._epoch:
                self._resolve(peer, lambda round: round > header.round, Outcome.VOID)
        elif header.kind is Kind.LEAVE:
            self._lose(peer, "left")

    def _check(self, header: Header, payload: Tensor | None) -> None:
        if header.run != self._run:
            raise WireError("it belongs to another run")
        if not 0 <= header.sender < self.world_size or header.sender == self.rank:
            raise WireError(f"rank {header.sender} is no peer of this run")
        if header.generation != self.generation:
            raise WireError(f"generation {header.generation} is not ours ({self.generation})")
        if header.kind is not Kind.DATA:
            if payload is not None:
                raise WireError(f"a {header.kind.name} message carries no payload")
            return
        if header.round < 0 or header.bucket >= len(self.plan):
            raise WireError(f"round {header.round}, bucket {header.bucket} is not in the plan")
        part = self.plan[header.bucket]
        size = 0 if payload is None else payload.numel()
        if (header.dtype, header.size_bytes, size) != (
            part.dtype,
            part.size_bytes,
            part.size_bytes,
        ):
            raise WireError(
                f"bucket {header.bucket} is planned as {part.size_bytes} bytes of {part.dtype}, "
                f"got {size} bytes announced as {header.size_bytes} of {header.dtype}"
            )

    def _deliver(self, header: Header, payload: Tensor) -> None:
        key = (header.sender, header.round, header.bucket)
        values = payload.view(self.plan[header.bucket].dtype)
        exchange = self._open.pop(key, None)
        if exchange is not None:
            self.bytes_received += header.size_bytes
            exchange.finish(Outcome.DELIVERED, values)
        elif header.round in self._given_up[header.sender] or key in self._early:
            logger.debug("rank %d dropped %s: given up, or here already", self.rank, key)
        elif len({key[1] for key in self._early if key[0] == header.sender}) >= _EARLY_ROUNDS:
            self.refused += 1
        else:
            self.bytes_received += header.size_bytes
            self._early[key] = values

    def _resolve(self, peer: int, which: Callable[[int], bool], outcome: Outcome) -> None:
        for key in [key for key in self._open if key[0] == peer and which(key[1])]:
            self._open.pop(key).finish(outcome)

    def _lose(self, peer: int, how: str) -> None:
        if peer in self._gone:
            return
        self._gone[peer] = how
        level = logging.INFO if how == "left" else logging.WARNING
        logger.log(level, "rank %d %s; rank %d goes on without it", peer, how, self.rank)
        self._resolve(peer, lambda round: True, Outcome.DEAD_PEER)
        self._transport.forget(peer)

    def _drop_early(self, peer: int, before: int) -> None:
        for key in [key for key in self._early if key[0] == peer and key[1] < before]:
            del self._early[key]
        for rounds in (self._given_up[peer], self._voided_by[peer]):
            rounds.difference_update([round for round in rounds if round < before])
