"""A channel: the protocol of exchanges, over any transport."""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from gossipgrad.comm._grants import Grants
from gossipgrad.comm._ledger import LOST, Exchange, Ledger, Outcome, place
from gossipgrad.comm._liveness import Liveness
from gossipgrad.comm._outbox import Outbox
from gossipgrad.comm._transport import Lost, Received, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind, Part, WireError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2  # for the last message; a peer that misses it sees the link go down
_LEFT = "left"
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that Ctrl-C and silent deaths are seen
_END_SECONDS = 5.0  # for another thread to end its wait, which takes `_WAKE_SECONDS`


class Channel:
    """Exchanges buckets with partners, one round after the other.

    An exchange counts iff both ends sent their part, in the same era: a generation of the
    membership, and in it an epoch between two collectives. A rank gives a round up (voids it) only
    before sending, and says so on that link. What is received is checked against the plan before it
    is kept: run, sender, bucket, dtype and size; anything else is dropped and counted in `refused`.

    When a peer is late, `take` returns `LATE` at the deadline and the exchange stays open. When it
    died or left, its open exchanges end as `DEAD_PEER`; no call raises for it.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that tell this run's messages from all others.
        plan: dtype and size of each bucket, equal on all ranks.
        credits: Rounds that may be open on one link; a further one is void at once. This bounds
            the memory: `credits + 1` snapshots.
        generation: The membership this rank lives in, until it enters another.
        liveness: Is notified of who is gone, and of later generations.
        peers: The ranks that live, where this one joins others: it does not say that it enters
            until it arrives. None: those of the transport, who begin together.

    Attributes:
        heard: The highest round that a message has named, -1 before any.
        bytes_sent: Of payloads that were posted to peers.
        bytes_received: Of payloads of rounds.
        refused: How many messages were dropped.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: bytes,
        plan: Sequence[Part],
        credits: int = 1,
        generation: int = 0,
        liveness: Liveness | None = None,
        peers: Collection[int] | None = None,
    ) -> None:
        if len(run) != 16:
            raise ValueError(f"run must be 16 bytes, got {len(run)}: use secrets.token_bytes(16)")
        if credits < 1:
            raise ValueError(f"credits must be at least 1, got {credits}")
        self.rank, self.world_size = transport.rank, transport.world_size
        self.largest_bytes: int | None = getattr(transport, "max_payload_bytes", None)
        self.plan, self.credits = tuple(plan), credits
        self.generation, self.epoch = generation, 0
        self.heard = -1
        self.bytes_sent = self.bytes_received = self.refused = 0
        self.transport, self.run = transport, run
        self.closed, self._process = False, os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listener: int | None = None  # the thread that receives
        self._is_over = False  # nobody receives any more
        self._liveness = liveness or Liveness()
        # All other ranks that were members in a generation that this rank has lived in.
        self._peers = set(range(self.world_size) if peers is None else peers) - {self.rank}
        self._arrived = peers is None
        self._ledgers: defaultdict[int, Ledger] = defaultdict(Ledger)
        self._outboxes: dict[int, Outbox] = {}  # of links that are open
        self._grants = Grants(self._changed, self._ledgers, self._say)
        self._last = -1  # place of the last round that was posted here
        self._later_epoch = 0  # of a peer that takes part in rounds of it
        self._accept_mail: Callable[[Header, Tensor | None], None] | None = None

    @property
    def early_bytes(self) -> int:
        """Memory of what arrived before this rank posted its round."""
        with self._lock:
            return sum(v.nbytes for to in self._ledgers.values() for v in to.early.values())

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, with which of the two."""
        with self._lock:
            return {peer: to.gone for peer, to in self._ledgers.items() if to.gone is not None}

    # -- rounds -----------------------------------------------------------------------------

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
        """Sends this rank's part of a bucket and expects the partner's; returns at once.

        Args:
            round: The round; on one link, rounds are posted in rising order.
            bucket: Index into the plan.
            payload: Flat, contiguous, in host memory, as the plan says. It must not be written
                before `exchange.ticket.done`.
            send_to: Who gets this part, None for no one.
            recv_from: Whose part is expected, None for no one.
            ready: Called in a background thread before sending; returns when `payload` is filled
                (a copy from an accelerator, say).

        Raises:
            ValueError: If the payload does not fit the plan.
            GossipError: If an earlier message could not be sent.
        """
        self.plan[bucket].check(payload, bucket)
        is_member = self._liveness.is_member()
        with self._lock:
            self._follow_epoch(round)
            exchange = Exchange(round, bucket, send_to, recv_from, self._place(round))
            if self.closed or not is_member:
                exchange.finish(Outcome.VOID)
                if send_to == recv_from and not self.closed:
                    self.void(round, send_to)  # else the partner waits for it
                return exchange
            self._last = max(self._last, exchange.at)
            self._grants.answer(self._last)
            if recv_from is None:
                exchange.finish(Outcome.DELIVERED)
            else:
                self._ledgers[recv_from].post(exchange, credits=self.credits)
                if exchange.outcome in (Outcome.VOID, Outcome.DEAD_PEER) and send_to == recv_from:
                    self.void(round, send_to)
                    return exchange
                if exchange.open:
                    self.watch(recv_from)
            if send_to is not None:
                self._check()
                header = self._header(Kind.DATA, round, bucket, self.plan[bucket])
                exchange.ticket = self._send(send_to, header, payload, ready)
        return exchange

    def turn(self, round: int, send_to: int) -> Callable[[float], None]:
        """What a part calls in a background thread, not to collide with those of rounds before it.

        Returns when the receiver's link is free, the round void, or so many seconds are over.
        """
        return self._grants.turn(send_to, self._place(round))

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Waits for the partner's part, at most `timeout_seconds`; `LATE` leaves it open.

        Raises:
            GossipError: If a part of this rank could not be sent.
        """
        deadline, left = time.perf_counter() + timeout_seconds, 0.0
        while exchange.open and left >= 0:
            self.poll(min(left, _WAKE_SECONDS), exchange)
            self._check()
            left = deadline - time.perf_counter()
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0, awaited: Exchange | None = None) -> None:
        """Accepts what has arrived; waits for the first message at most `timeout_seconds`.

        One thread at a time listens, and may serve those that wait beside it for what is `awaited`.
        """
        deadline = time.perf_counter() + timeout_seconds
        with self._changed:

            def is_served() -> bool:
                return self._is_over or (awaited is not None and not awaited.open)

            self._changed.wait_for(lambda: self._listener is None or is_served(), timeout_seconds)
            if self._listener is not None or is_served():
                return
            self._listener = threading.get_ident()
        try:
            events = self.transport.receive(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, LOST)
                    else:
                        self._accept(event)
                for peer in self._peers.intersection(self._liveness.expelled()):
                    if self._ledgers[peer].gone is None:
                        self._lose(peer, LOST)
                self._grants.answer(self._last)
        finally:
            with self._changed:
                self._listener = None
                self._changed.notify_all()

    def cancel(self, exchange: Exchange) -> None:
        """Gives up an open exchange; the partner's part is dropped should it arrive."""
        with self._lock:
            if exchange.open:
                assert exchange.recv_from is not None
                self._ledgers[exchange.recv_from].cancel(exchange)

    def void(self, round: int, send_to: int | None) -> None:
        """Gives a round up before any part of it was sent, and notifies `send_to`."""
        if send_to is None:
            return
        with self._lock:
            ledger, at = self._ledgers[send_to], self._place(round)
            if ledger.gone is None and at > ledger.given_up:
                ledger.given_up = at
                ledger.prune(before=at + 1)
                self._grants.release(at)
                self._notify(Kind.VOID, [send_to], round)

    # -- collectives and generations --------------------------------------------------------

    def fence(self) -> int:
        """Begins a collective: enters the next epoch, notifies everyone, and returns its number.

        Nothing more is sent of earlier epochs. So partners that are rounds ahead see those rounds
        as void instead of waiting for this rank, and what both ends have sent still counts. If the
        collective fails, rounds go on in this epoch: a peer that has not entered it does so after
        the first round that this rank makes with it, which is void.
        """
        with self._lock:
            self._enter_era(self.generation, self.epoch + 1)
            self._notify(Kind.FENCE, self._peers, 0)
            return self.epoch

    def resume(self, epochs: Mapping[int, int], next_round: int) -> None:
        """Ends a collective that all ranks have entered.

        Args:
            epochs: What `fence` returned on each rank.
            next_round: Where rounds go on, equal on all ranks.
        """
        with self._lock:
            self._enter_era(self.generation, max(epochs.values()))
            self.heard = next_round - 1
            for peer in epochs.keys() - {self.rank}:
                # Its word for that may come later than this collective has ended.
                self._ledgers[peer].latest = max(self._ledgers[peer].latest, self._place(0))

    def restart(self, next_round: int, members: Iterable[int]) -> None:
        """After a collective, all ranks at once: rounds go on by lower numbers, in a new epoch."""
        self.resume(dict.fromkeys(members, self.epoch + 1), next_round)

    def enter(self, generation: int, next_round: int, living: Collection[int]) -> None:
        """Lives in another membership from `next_round` on, and notifies those who live in it.

        What is in flight with them counts if both have sent their part before they entered; with
        others it is over. Rounds with a peer are void until it has said that it entered, too. Links
        that broke between those who live are made anew.
        """
        with self._lock:
            assert generation > self.generation, f"generation {generation} is no later one"
            peers = {*living} - {self.rank}
            if getattr(self.transport, "reopens", False):
                for peer in peers:
                    if self._ledgers[peer].gone == LOST:
                        self._ledgers[peer] = Ledger()
                        self._outboxes.pop(peer, None)
            self._peers |= peers
            self._enter_era(generation, 0)
            if self._arrived:
                self._notify(Kind.FENCE, living, next_round)

    def arrive(self, next_round: int, living: Collection[int]) -> None:
        """Takes part from `next_round` on, where this rank has joined others, and notifies them.

        Until then rounds with it are void at once on all of them.
        """
        with self._lock:
            self._arrived = True
            self._notify(Kind.FENCE, living, next_round)

    def replan(self, plan: Sequence[Part]) -> None:
        """Goes on with other buckets; nothing may be open, and all ranks do it between rounds."""
        with self._lock:
            for ledger in self._ledgers.values():
                assert not ledger.open, "exchanges are open"
                ledger.early.clear()
            self.plan = tuple(plan)

    def close(self, linger_seconds: float = 2.0) -> None:
        """Sends LEAVE on every link and closes; open exchanges end as `VOID`; local.

        What was posted is sent on for at most `linger_seconds`.
        """
        if os.getpid() != self._process:
            return  # a fork of the process: the links are its parent's
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._grants.release(self._last)
            for ledger in self._ledgers.values():
                for exchange in [*ledger.open.values()]:
                    ledger.cancel(exchange)
        deadline = time.perf_counter() + linger_seconds
        with ExitStack() as at_last:  # the first comes last; all run, even in an interrupt
            at_last.callback(self._end, min(_LEAVE_SECONDS, linger_seconds))
            at_last.callback(self._drain, deadline)
            self.poll(0.0)
            while not self._is_all_sent() and time.perf_counter() < deadline:
                self.poll(0.005)

    # -- mail -------------------------------------------------------------------------------

    def attach(self, accept: Callable[[Header, Tensor | None], None]) -> None:
        """Calls `accept` for all mail from now on; it returns at once, or raises `WireError`."""
        with self._lock:
            assert self._accept_mail is None, "a channel has one mailbox"
            self._accept_mail = accept

    def watch(self, peer: int) -> None:
        """Opens the link to a peer, so that its end is noticed, though nothing was sent yet."""
        with self._lock:
            self.transport.open(peer)
            self._outbox(peer)

    def send_mail(
        self, key: int, version: int, values: Tensor, peers: Iterable[int]
    ) -> list[Ticket]:
        """Sends a version of a mailbox's tensor to peers that are not gone; returns at once."""
        part = Part(values.dtype, values.numel())
        header = self._header(Kind.MAIL, version, key, part)
        with self._lock:
            if self.closed:
                return []
            return [self._send(peer, header, values) for peer in {*peers} - {self.rank}]

    # -- messages ---------------------------------------------------------------------------

    def _place(self, round: int) -> int:
        return place(self.generation, self.epoch, round)

    def _header(self, kind: Kind, round: int, bucket: int = 0, part: Part | None = None) -> Header:
        dtype, size_bytes = (None, 0) if part is None else (part.dtype, part.size_bytes)
        era = self.generation, self.epoch
        return Header(kind, self.run, self.rank, *era, round, bucket, dtype, size_bytes)

    def _outbox(self, peer: int) -> Outbox:
        if peer not in self._outboxes:
            self._outboxes[peer] = Outbox(self.transport, peer, self._lock)
        return self._outboxes[peer]

    def _send(
        self,
        peer: int,
        header: Header,
        payload: Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Ticket:
        if self._ledgers[peer].gone is not None:
            return Sent()
        self.bytes_sent += header.size_bytes
        return self._outbox(peer).send(header.pack(), payload, ready)

    def _notify(self, kind: Kind, peers: Iterable[int], round: int) -> None:
        for peer in {*peers} - {self.rank}:
            self._send(peer, self._header(kind, round))

    def _say(self, kind: Kind, peer: int, at: int) -> None:
        """Sends `ASK` or `GO` of a round of this era, past what waits to be sent."""
        round = at - self._place(0)
        if round >= 0 and self._ledgers[peer].gone is None:
            self._outbox(peer)
            self.transport.send(peer, self._header(kind, round).pack())

    def _check(self) -> None:
        for outbox in [*self._outboxes.values()]:
            outbox.check()

    def _enter_era(self, generation: int, epoch: int) -> None:
        if generation > self.generation:
            self._later_epoch = 0
        self.generation, self.epoch = generation, epoch
        self._grants.release(self._last)
        for ledger in self._ledgers.values():
            ledger.prune(before=self._place(0))

    def _follow_epoch(self, round: int) -> None:
        """Enters, between two rounds, the epoch of a peer whose collective has failed."""
        if self._later_epoch > self.epoch and self._place(round) > self._last:
            self._enter_era(self.generation, self._later_epoch)

    def _read(self, arrival: Received) -> tuple[Header, Tensor | None]:
        """The header of a message of this run, and what it brings.

        Raises:
            WireError: It is none, or does not fit the plan.
        """
        header, payload = Header.unpack(arrival.header), arrival.payload
        if header.run != self.run:
            raise WireError("it belongs to another run")
        # One that joins may send before this rank has heard of its generation.
        is_known = header.sender in self._peers or header.generation > self.generation
        if header.sender == self.rank or not is_known:
            raise WireError(f"rank {header.sender} is no peer of this run")
        if header.kind is Kind.DATA:
            if header.round < 0 or header.bucket >= len(self.plan):
                raise WireError(f"round {header.round}, bucket {header.bucket} is not in the plan")
            payload = self.plan[header.bucket].read(header, payload)
        elif payload is not None and header.kind is not Kind.MAIL:
            raise WireError(f"a {header.kind.name} message carries no payload")
        return header, payload

    def _accept(self, arrival: Received) -> None:
        try:
            header, payload = self._read(arrival)
            if header.generation > self.generation:
                self._liveness.hear_generation(header.generation)
            self._handle(header, payload)
        except WireError as error:
            self.refused += 1
            logger.debug("rank %d dropped a message: %s", self.rank, error)

    def _handle(self, header: Header, payload: Tensor | None) -> None:
        """Does what a message of this run says.

        Raises:
            WireError: Its sender is gone, or what it brings cannot be kept.
        """
        kind, peer = header.kind, header.sender
        ledger = self._ledgers[peer]
        if ledger.gone is not None:
            is_last = kind in (Kind.LEAVE, Kind.PART)
            if ledger.gone == LOST and not ledger.was_notified and not is_last:
                # Our link to it broke, not its to us: without a message it would wait for us.
                ledger.was_notified = True
                self.transport.send(peer, self._header(Kind.PART, 0).pack())
            raise WireError(f"rank {peer} {ledger.gone}")
        at = place(header.generation, header.epoch, header.round)
        if kind is Kind.MAIL:
            if self._accept_mail is None:
                raise WireError("there is no mailbox")
            self._accept_mail(header, payload)
        elif kind is Kind.LEAVE:
            self._lose(peer, _LEFT)
        elif kind is Kind.PART:
            if header.generation >= self.generation:  # else the link was made anew since
                ledger.was_notified = True
                self._lose(peer, LOST)
        elif kind in (Kind.ASK, Kind.GO):
            self._grants.hear(kind, peer, at)
        else:
            ledger.advance(at + 1 if kind is Kind.VOID else at)
            if at >= self._place(0):  # of an earlier era it may be of a rank that is lost
                self.heard = max(self.heard, header.round)
            if kind is not Kind.FENCE and header.generation == self.generation:
                self._later_epoch = max(self._later_epoch, header.epoch)
            if kind is Kind.DATA:
                assert payload is not None
                self.bytes_received += header.size_bytes
                if not ledger.deliver(at, header.bucket, payload):
                    raise WireError(f"round {header.round} is too far ahead")

    def _lose(self, peer: int, how: str) -> None:
        ledger = self._ledgers[peer]
        self.transport.forget(peer)
        if ledger.gone is not None:
            return
        level = logging.INFO if how == _LEFT else logging.WARNING
        logger.log(level, "rank %d %s; rank %d goes on without it", peer, how, self.rank)
        ledger.end(how)
        if peer in self._outboxes:
            self._outboxes[peer].end()
        self._liveness.hear_end(peer, left=how == _LEFT)

    # -- the end ----------------------------------------------------------------------------

    def _is_all_sent(self) -> bool:
        with self._lock:
            return all(outbox.is_empty for outbox in self._outboxes.values())

    def _drain(self, deadline: float) -> None:
        with self._lock:
            for outbox in self._outboxes.values():
                outbox.drain(deadline - time.perf_counter())

    def _end(self, leave_seconds: float) -> None:
        """Sends LEAVE and closes the transport, once no other thread receives."""
        try:
            with self._lock:
                self._notify(Kind.LEAVE, [*self._outboxes], 0)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
                # A session that nobody closed may be collected, and so closed, in its listener.
                has_ended = self._changed.wait_for(
                    lambda: self._listener in (None, threading.get_ident()), _END_SECONDS
                )
            if has_ended:
                self.transport.close(leave_seconds)
            else:
                logger.warning("a thread listens still: rank %d leaves its links open", self.rank)
