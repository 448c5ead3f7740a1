"""A channel: the protocol of exchanges, over any transport."""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Outcome
from gossipgrad.comm._ledger import Ledger
from gossipgrad.comm._part import Part, check_fits
from gossipgrad.comm._sender import DeferredSender
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind, WireError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2  # for the last word; a peer that misses it sees the link go down
_LOST, _LEFT = "was lost", "left"
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that Ctrl-C and silent deaths are seen


class Channel:
    """Exchanges buckets with partners, one round after the other.

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
        self._sender = DeferredSender(self._transmit)
        self._run = run
        self._lock = threading.RLock()
        self._turn = threading.Condition()  # whose turn it is to listen
        self._listening = False
        self._ledgers: defaultdict[int, Ledger] = defaultdict(Ledger)
        self._linked: set[int] = set()
        self._tickets: list[tuple[int, Ticket]] = []
        self._last_round = -1
        self._epoch = 0
        self._closed = False  # towards the caller
        self._shut = False  # towards the transport
        self._process = os.getpid()

    @property
    def early_bytes(self) -> int:
        """Memory of what came before this rank posted its round."""
        with self._lock:
            return sum(ledger.early_bytes for ledger in self._ledgers.values())

    @property
    def last_round(self) -> int:
        """The highest round that was posted, -1 before the first."""
        return self._last_round

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, with which of the two."""
        with self._lock:
            ended = {peer: ledger.gone for peer, ledger in self._ledgers.items()}
            return {peer: how for peer, how in ended.items() if how is not None}

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
            if self._closed:
                exchange.finish(Outcome.VOID)
                return exchange
            self._last_round = max(self._last_round, round)
            if recv_from is None:
                self._send_part(exchange, payload, ready)
                exchange.finish(Outcome.DELIVERED)
                return exchange
            ledger = self._ledgers[recv_from]
            assert (round, bucket) not in ledger.open, f"round {round} is posted twice"
            ledger.prune(before=round)
            early = ledger.early.pop((round, bucket), None)
            refusal = None
            if early is None:
                refusal = ledger.refusal(round, credits=self.credits, epoch=self._epoch)
            if refusal is None:
                if early is None:
                    self._transport.open(recv_from)
                    self._linked.add(recv_from)
                self._send_part(exchange, payload, ready)
                if early is None:
                    ledger.open[round, bucket] = exchange
                else:
                    exchange.finish(Outcome.DELIVERED, early)
                return exchange
            exchange.finish(refusal)
            if send_to != recv_from:
                ledger.cancelled.add(round)
                self._send_part(exchange, payload, ready)
            elif round not in ledger.voided:
                self._give_up(send_to, round)
        return exchange

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Waits for the partner's part, at most `timeout_seconds`; `LATE` leaves it open."""
        deadline = time.perf_counter() + timeout_seconds
        self._poll(0.0, exchange)
        while exchange.open:
            left = deadline - time.perf_counter()
            if left <= 0:
                break
            self._poll(min(left, _WAKE_SECONDS), exchange)
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Takes in what has come; waits for the first message at most `timeout_seconds`."""
        self._poll(timeout_seconds)

    def cancel(self, exchange: Exchange) -> None:
        """Gives up an open exchange; the partner's part is dropped should it come."""
        with self._lock:
            if exchange.open:
                assert exchange.recv_from is not None
                self._ledgers[exchange.recv_from].cancel(exchange)

    def void(self, round: int, send_to: int | None) -> None:
        """Gives a round up before anything of it was sent, and tells `send_to`."""
        with self._lock:
            self._give_up(send_to, round)

    def replan(self, plan: Sequence[Part]) -> None:
        """Goes on with other buckets; nothing may be open, and all ranks do it between rounds."""
        with self._lock:
            assert not any(ledger.open for ledger in self._ledgers.values()), "exchanges are open"
            for ledger in self._ledgers.values():
                ledger.early.clear()
            self.plan = tuple(plan)

    def settle(self) -> None:
        """Tells everyone that nothing past the last posted round comes before `resume`.

        Partners that are rounds ahead then see those rounds as void instead of waiting for us.
        """
        with self._lock:
            self._announce(Kind.SETTLE, range(self.world_size))

    def unsettle(self) -> None:
        """Takes back `settle`: the ranks did not come together, and rounds go on as they were."""
        with self._lock:
            self._announce(Kind.SETTLE, range(self.world_size), ahead=0)

    def resume(self, last_rounds: Sequence[int], next_round: int) -> None:
        """Ends what `settle` began, once all ranks came together.

        Args:
            last_rounds: The last round that each rank has posted; what is open past it is void.
            next_round: Where rounds go on, equal on all ranks.
        """
        with self._lock:
            self._epoch += 1
            for peer, last_round in enumerate(last_rounds):
                ledger = self._ledgers[peer]
                ledger.resolve(lambda round, last=last_round: round > last, Outcome.VOID)
                ledger.prune(before=next_round)

    def close(self, linger_seconds: float = 2.0) -> None:
        """Says LEAVE on every link and closes; open exchanges end as `VOID`; local.

        What was posted is sent on for at most `linger_seconds`; no one is awaited.
        """
        if os.getpid() != self._process:
            return  # a fork of the process: the links are its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for ledger in self._ledgers.values():
                for exchange in list(ledger.open.values()):
                    ledger.cancel(exchange)
        deadline = time.perf_counter() + linger_seconds
        self._poll(0.0)
        while not self._all_sent() and time.perf_counter() < deadline:
            self._poll(0.005)
        self._sender.drain(max(0.0, deadline - time.perf_counter()))
        with self._lock:
            self._announce(Kind.LEAVE, self._linked)
        with self._turn:
            self._turn.wait_for(lambda: not self._listening)
            self._shut = True
            self._transport.close(min(_LEAVE_SECONDS, linger_seconds))

    def _poll(self, timeout_seconds: float, awaited: Exchange | None = None) -> None:
        """Like `poll`; one thread at a time listens, and may serve those that wait beside it."""

        def served() -> bool:
            return self._shut or (awaited is not None and not awaited.open)

        deadline = time.perf_counter() + timeout_seconds
        with self._turn:
            self._turn.wait_for(lambda: not self._listening or served(), timeout_seconds)
            if self._listening or served():
                return
            self._listening = True
        try:
            events = self._transport.receive(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, _LOST)
                    else:
                        self._accept(event)
        finally:
            with self._turn:
                self._listening = False
                self._turn.notify_all()

    def _all_sent(self) -> bool:
        with self._lock:
            self._tickets = [(peer, t) for peer, t in self._tickets if not t.done]
            return all(self._ledgers[peer].gone for peer, _ in self._tickets)

    def _transmit(self, peer: int, header: bytes, payload: Tensor | None) -> Ticket:
        with self._lock:
            if self._ledgers[peer].gone is not None:
                return Sent()
            return self._transport.send(peer, header, payload)

    def _header(self, kind: Kind, *, round: int, bucket: int = 0, ahead: int = 1) -> Header:
        part = self.plan[bucket] if kind is Kind.DATA else None
        return Header(
            kind=kind,
            run=self._run,
            sender=self.rank,
            generation=self.generation,
            round=round,
            epoch=self._epoch + ahead,
            bucket=bucket,
            dtype=None if part is None else part.dtype,
            size_bytes=0 if part is None else part.size_bytes,
            voided=(round,) if kind is Kind.NOTE else (),
        )

    def _send_part(
        self, exchange: Exchange, payload: Tensor, ready: Callable[[], None] | None
    ) -> None:
        peer = exchange.send_to
        if peer is None or self._ledgers[peer].gone is not None:
            exchange.ticket = Sent()
            return
        header = self._header(Kind.DATA, round=exchange.round, bucket=exchange.bucket)
        exchange.ticket = self._sender.send(peer, header.pack(), payload, ready)
        self._linked.add(peer)
        self._tickets = [(to, t) for to, t in self._tickets if not t.done]
        self._tickets.append((peer, exchange.ticket))
        self.bytes_sent += header.size_bytes

    def _give_up(self, peer: int | None, round: int) -> None:
        """Voids a round towards `peer`, before any part of it was sent, and names it at once."""
        if peer is None:
            return
        ledger = self._ledgers[peer]
        if ledger.gone is not None or round in ledger.given_up:
            return
        ledger.give_up(round)
        note = self._header(Kind.NOTE, round=round)
        self._sender.send(peer, note.pack(), None, None)
        self._linked.add(peer)

    def _announce(self, kind: Kind, peers: Iterable[int], *, ahead: int = 1) -> None:
        header = self._header(kind, round=self._last_round, ahead=ahead).pack()
        for peer in set(peers) - {self.rank}:
            if self._ledgers[peer].gone is None:
                self._sender.send(peer, header, None, None)
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
        ledger = self._ledgers[peer]
        if ledger.gone is not None:
            self.refused += 1
            if ledger.gone == _LOST and not ledger.parted and header.kind is not Kind.LEAVE:
                # Our link to it broke, not its to us: without a word it would wait for us.
                ledger.parted = True
                leave = self._header(Kind.LEAVE, round=self._last_round)
                self._transport.send(peer, leave.pack())
            return
        if header.kind is Kind.LEAVE:
            self._lose(peer, _LEFT)
        elif header.kind is Kind.SETTLE:
            ledger.settled = (header.epoch, header.round)
            if header.epoch > self._epoch:
                ledger.resolve(lambda round: round > header.round, Outcome.VOID)
        else:
            if header.round > ledger.settled[1]:
                ledger.settled = (0, header.round)  # it goes on, whatever became of the collective
            ledger.passed(header.round)
            if header.voided:
                ledger.voided.update(header.voided)
                ledger.resolve(lambda round: round in header.voided, Outcome.VOID)
            if header.kind is Kind.DATA:
                self._deliver(ledger, header, arrival.payload)

    def _deliver(self, ledger: Ledger, header: Header, payload: Tensor | None) -> None:
        body = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        values = body.view(self.plan[header.bucket].dtype)
        if ledger.deliver(header.round, header.bucket, values):
            self.bytes_received += header.size_bytes
        else:
            self.refused += 1

    def _check(self, header: Header, payload: Tensor | None) -> None:
        if header.run != self._run:
            raise WireError("it belongs to another run")
        if not 0 <= header.sender < self.world_size or header.sender == self.rank:
            raise WireError(f"rank {header.sender} is no peer of this run")
        if header.generation != self.generation:
            raise WireError(f"generation {header.generation} is not ours ({self.generation})")
        check_fits(header, payload, self.plan)

    def _lose(self, peer: int, how: str) -> None:
        ledger = self._ledgers[peer]
        self._transport.forget(peer)
        if ledger.gone is not None:
            return
        ledger.gone = how
        level = logging.INFO if how == _LEFT else logging.WARNING
        logger.log(level, "rank %d %s; rank %d goes on without it", peer, how, self.rank)
        ledger.resolve(lambda round: True, Outcome.DEAD_PEER)
