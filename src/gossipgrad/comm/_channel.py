"""A channel: the protocol of exchanges, over any transport."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from gossipgrad.comm._between_rounds import BetweenRounds
from gossipgrad.comm._exchange import Exchange, Outcome
from gossipgrad.comm._grants import Grants
from gossipgrad.comm._hand_over import Severed, WithoutRun
from gossipgrad.comm._ledgers import LOST, Ledgers
from gossipgrad.comm._news import News, Unheard
from gossipgrad.comm._outbox import Outbox
from gossipgrad.comm._part import Part, check_planned, check_run, header_of, read, values_of
from gossipgrad.comm._place import place
from gossipgrad.comm._settlements import Settlements
from gossipgrad.comm._transport import Arrival, Lost, Transport
from gossipgrad.comm._turn import Turn
from gossipgrad.comm._wire import Header, Kind, WireError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2  # for the last word; a peer that misses it sees the link go down
_LEFT = "left"
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that Ctrl-C and silent deaths are seen


class Channel(BetweenRounds):
    """Exchanges buckets with partners, one round after the other.

    An exchange counts iff both ends sent their part, in the same generation of the membership. A
    rank gives a round up (voids it) only before sending, and names it in the next header on that
    link. What is received is checked against the plan before it is kept: run, sender, bucket, dtype
    and size; anything else is dropped and counted in `refused`.

    When a peer is late, `take` returns `LATE` at the deadline and the exchange stays open. When it
    died or left, its open exchanges end as `DEAD_PEER`; no call raises for it.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that tell this run's messages from all others.
        plan: dtype and size of each bucket, equal on all ranks.
        credits: Rounds that may be open on one link; a further one is void at once. This bounds
            the memory: `credits + 1` snapshots.
        generation: The membership this rank lives in, until it enters another.
        news: Is told who is gone, and of later generations.
        peers: The ranks that there are, where this one joins others: it says nothing of entering
            until it arrives. None: those of the transport, who begin together.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: bytes,
        plan: Sequence[Part],
        credits: int = 1,
        generation: int = 0,
        news: News | None = None,
        peers: Collection[int] | None = None,
    ) -> None:
        check_run(run, credits)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.largest_bytes: int | None = getattr(transport, "max_payload_bytes", None)
        self.plan, self.credits, self.generation = tuple(plan), credits, generation
        self.refused = self.bytes_received = 0
        self._transport, self._run = transport, run
        self._lock = threading.RLock()
        self._news = Unheard() if news is None else news
        self._turn = Turn()
        self._ledgers = Ledgers(self.rank, range(self.world_size) if peers is None else peers)
        self._arrived = peers is None
        self._outbox = Outbox(
            transport,
            self._lock,
            gone=lambda peer: self._ledgers[peer].gone is not None,
            known=lambda peer: self._ledgers[peer].knows(self.generation),
        )
        self._grants = Grants(self._lock, self._ledgers, self._say)
        self._settlements = Settlements()
        self._last_round = self.heard = -1  # posted here; and the highest that a message told of
        self.closed, self._process = False, os.getpid()

    @property
    def transport(self) -> Transport:
        """Moves the bytes."""
        return self._transport

    @property
    def run(self) -> bytes:
        """What tells this run's messages from all others."""
        return self._run

    @property
    def early_bytes(self) -> int:
        """Memory of what came before this rank posted its round."""
        with self._lock:
            return self._ledgers.early_bytes

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that were posted to peers."""
        return self._outbox.bytes_sent

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, with which of the two."""
        with self._lock:
            return self._ledgers.gone

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
        check_planned(bucket, payload, self.plan)
        with self._lock:
            at = place(self.generation, round)
            exchange = Exchange(round, bucket, send_to, recv_from, at=at)
            if self.closed or not self._news.is_member():
                exchange.finish(Outcome.VOID)
                return exchange
            self._last_round = max(self._last_round, at)
            self._grants.answer(self.generation, self._last_round)
            header = self._header(Kind.DATA, round=round, bucket=bucket)
            if send_to is not None and send_to != recv_from:
                receiver = self._ledgers[send_to]
                if receiver.absent or at <= receiver.given_up:
                    self.void(round, send_to)
                    exchange.send_to = None
                receiver.silent_rounds = 0  # it may never speak; the part tells
            if recv_from is None:
                self._outbox.part(exchange, header, payload, ready)
                exchange.finish(Outcome.DELIVERED)
                return exchange
            ledger = self._ledgers[recv_from]
            assert (at, bucket) not in ledger.open, f"round {round} is posted twice"
            exchange.known = ledger.knows(self.generation)
            ledger.prune(before=at)
            early = ledger.take_early((at, bucket), mutual=send_to == recv_from)
            refusal = None if early is not None else ledger.refusal(at, credits=self.credits)
            if refusal is not None:
                exchange.finish(refusal)
                if send_to == recv_from:
                    if at not in ledger.voided:
                        self.void(round, send_to)
                    return exchange
                ledger.cancelled.add(at)
            elif early is None:
                self._transport.open(recv_from)
                self._outbox.linked.add(recv_from)
            self._outbox.part(exchange, header, payload, ready)
            if early is not None:
                exchange.finish(Outcome.DELIVERED, early)
            elif refusal is None:
                ledger.open[at, bucket] = exchange
        return exchange

    def turn(self, round: int, send_to: int) -> Callable[[float], None]:
        """What a part calls in a background thread, not to come upon those of rounds before it.

        Returns when the receiver's link is free, the round void, or so many seconds are over.
        """
        return self._grants.turn(send_to, place(self.generation, round))

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Waits for the partner's part, at most `timeout_seconds`; `LATE` leaves it open.

        Raises:
            GossipError: If a part of this rank could not be sent.
        """
        deadline, left = time.perf_counter() + timeout_seconds, 0.0
        while exchange.open and left >= 0:
            self.poll(min(left, _WAKE_SECONDS), exchange)
            self._outbox.check()
            left = deadline - time.perf_counter()
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0, awaited: Exchange | None = None) -> None:
        """Takes in what has come; waits for the first message at most `timeout_seconds`.

        One thread at a time listens, and may serve those that wait beside it for what is `awaited`.
        """
        deadline = time.perf_counter() + timeout_seconds
        with self._turn.take(
            lambda: awaited is not None and not awaited.open, timeout_seconds
        ) as mine:
            if not mine:
                return
            events = self._transport.receive(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, LOST)
                    else:
                        self._accept(event)
                for peer in self._ledgers.there(self._news.expelled()):
                    self._lose(peer, LOST)
                self._grants.answer(self.generation, self._last_round)

    def cancel(self, exchange: Exchange) -> None:
        """Gives up an open exchange; the partner's part is dropped should it come."""
        with self._lock:
            if exchange.open:
                assert exchange.recv_from is not None
                self._ledgers[exchange.recv_from].cancel(exchange)

    def void(self, round: int, send_to: int | None) -> None:
        """Gives a round up before any part of it was sent, and names it to `send_to`."""
        if send_to is None:
            return
        with self._lock:
            ledger, at = self._ledgers[send_to], place(self.generation, round)
            if ledger.gone is None and at > ledger.given_up and ledger.give_up(at):
                self._grants.release(at)
                self._say(Kind.NOTE, send_to, at)

    def close(self, linger_seconds: float = 2.0) -> None:
        """Says LEAVE on every link and closes; open exchanges end as `VOID`; local.

        What was posted is sent on for at most `linger_seconds`; no one is awaited.
        """
        if os.getpid() != self._process:
            return  # a fork of the process: the links are its parent's
        with self._lock:
            if self.closed:
                return
            self.closed = self._grants.over = True
            for ledger in self._ledgers.values():
                ledger.cancel_all()
        deadline = time.perf_counter() + linger_seconds
        with ExitStack() as at_last:  # the first comes last; all come, even in an interrupt
            at_last.callback(self._end, min(_LEAVE_SECONDS, linger_seconds))
            at_last.callback(lambda: self._outbox.drain(max(0.0, deadline - time.perf_counter())))
            self.poll(0.0)
            while not self._outbox.empty and time.perf_counter() < deadline:
                self.poll(0.005)

    def hand_over(self) -> Transport:
        """Ends without a word, as on all ranks; its links are free for a channel of another run."""
        transport, self._transport = self._transport, Severed(self._transport)
        self._outbox.linked.clear()
        self.close(0.0)
        return WithoutRun(transport, self._run)

    def _end(self, leave_seconds: float) -> None:
        """Says LEAVE and closes the transport."""
        try:
            with self._lock:
                self._announce(Kind.LEAVE, self._outbox.linked)
        finally:
            if self._turn.end():
                self._transport.close(leave_seconds)

    def _catch_up(self, peer: int) -> None:
        if (at := self._ledgers[peer].catch_up(self.generation)) is not None:
            self._say(Kind.NOTE, peer, at)

    def _say(self, kind: Kind, peer: int, at: int) -> None:
        self._outbox.tell(self._header(kind, round=at - place(self.generation, 0)), [peer])

    def _header(self, kind: Kind, *, round: int, bucket: int = 0) -> Header:
        generation, epoch = self.generation, self._settlements.number(self.generation)
        bare = Header(kind, self._run, self.rank, generation, round, epoch, bucket=bucket)
        return header_of(bare, self.plan)

    def _announce(self, kind: Kind, peers: Iterable[int], round: int | None = None) -> None:
        last = self._last_round - place(self.generation, 0)
        header = self._header(kind, round=last if round is None else round)
        self._outbox.tell(header, set(peers) - {self.rank})

    def _accept(self, arrival: Arrival) -> None:
        try:
            may_send = partial(self._ledgers.may_send, here=self.generation)
            header = read(arrival, self.plan, run=self._run, rank=self.rank, may_send=may_send)
        except WireError as error:
            self.refused += 1
            logger.debug("rank %d dropped a message: %s", self.rank, error)
            return
        ledger = self._ledgers[peer := header.sender]
        if header.generation > self.generation:
            self._news.ahead(header.generation)
        if ledger.gone is not None:
            self.refused += 1
            last_word = header.kind in (Kind.LEAVE, Kind.PART)
            if ledger.gone == LOST and not ledger.parted and not last_word:
                # Our link to it broke, not its to us: without a word it would wait for us.
                ledger.parted = True
                self._transport.send(peer, self._header(Kind.PART, round=-1).pack())
            return
        if header.generation >= self.generation:  # of an older one it may be of a rank given up
            self.heard = max(self.heard, header.round)
        self._catch_up(peer)
        at = place(header.generation, header.round)
        if header.kind in (Kind.ASK, Kind.GO):
            self._grants.hear(header.kind, peer, at)
            return
        ledger.hear(header.generation, header.known)
        if header.kind is Kind.LEAVE:
            self._lose(peer, _LEFT)
        elif header.kind is Kind.PART:
            if header.generation >= self.generation:  # else the link was made anew since
                ledger.parted = True
                self._lose(peer, LOST)
        elif header.kind is Kind.SETTLE:
            ledger.settle(header.generation, header.epoch, at)
        elif header.kind is Kind.GO_ON:
            ledger.go_on(header.generation, header.epoch)
        else:
            voided = {place(header.generation, round) for round in header.voided}
            ledger.move_on(header.generation, header.epoch, at, voided)
            if header.kind is not Kind.DATA:
                return
            self.bytes_received += header.size_bytes
            if self._settlements.makes_void(header.generation, known=header.known, at=at):
                ledger.void(at)
            else:
                values = values_of(header, arrival.payload, self.plan)
                self.refused += not ledger.deliver(at, header.bucket, values)

    def _lose(self, peer: int, how: str) -> None:
        ledger = self._ledgers[peer]
        self._transport.forget(peer)
        if ledger.gone is not None:
            return
        level = logging.INFO if how == _LEFT else logging.WARNING
        logger.log(level, "rank %d %s; rank %d goes on without it", peer, how, self.rank)
        ledger.end(how, keep_early=how == _LEFT)
        self._news.gone(peer, left=how == _LEFT)
