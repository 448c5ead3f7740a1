"""A channel: the protocol of exchanges, over any transport."""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Ledger, Outcome, Position
from gossipgrad.comm._membership import LEFT, LOST, Liveness
from gossipgrad.comm._transport import Lost, Received, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind, Part, WireError
from gossipgrad.errors import GossipError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0  # until the others have read LEAVE, which their threads of links do at once
_WAKE_SECONDS = 0.5  # a wait wakes this often, to notice Ctrl-C and silent deaths
_LISTEN_SECONDS = 0.1  # of one poll of the thread that receives, for which closing waits
_FILL_SECONDS = 0.001  # of one poll while a part that could leave is being filled
_PIECE_BYTES = 1 << 20  # of a replica's state, which a joiner gets
_END_SECONDS = 5.0  # for another thread to end its wait, which takes `_WAKE_SECONDS`


class Channel:
    """Exchanges buckets with partners, one round after the other.

    An exchange counts iff both ends said READY (`_exchange.py`), in the same era: a generation of
    the membership and an epoch (between two collectives) in it. A part leaves when its receiver is
    ready, and is received into the memory that was posted for it. Every message is checked against
    the plan before it is kept: run, sender, bucket, dtype and size; any other is dropped and
    counted in `refused`.

    When a peer is late, `take` returns `LATE` at the deadline and the exchange stays open. When it
    died or left, its open exchanges end as `DEAD_PEER`; no call raises for that.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that identify this run's messages.
        plan: dtype and size of each bucket, equal on all ranks.
        window: Rounds that may be open on one link; a further one is void immediately.
        generation: The generation of this rank's membership at the start.
        liveness: Notified of ranks that left or died, and of later generations.
        peers: For a joiner, the living ranks; it takes part in rounds after `arrive`. None: all
            ranks of the transport, which start together.

    Attributes:
        heard: The highest round that a message has named, -1 before any.
        bytes_received: Of payloads of rounds.
        refused: How many messages were dropped.
        silent: Ranks that another one has waited for in vain, and of which nothing came since.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: bytes,
        plan: Sequence[Part],
        window: int = 1,
        generation: int = 0,
        liveness: Liveness | None = None,
        peers: Collection[int] | None = None,
    ) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self.plan, self.window = tuple(plan), window
        self.generation, self.epoch = generation, 0
        self.heard = -1
        self.silent: set[int] = set()
        self.bytes_received = self.refused = 0
        self._posted_bytes = 0  # to be sent, less what a ledger that was replaced has dropped
        self.transport, self.run = transport, run
        self.closed, self._process = False, os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listener: int | None = None  # the thread that receives
        self._is_over = False  # no thread receives any more
        self._liveness = liveness or Liveness()
        # All other ranks that were members of a generation that this rank was in.
        self._peers = set(range(self.world_size) if peers is None else peers) - {self.rank}
        self._arrived = peers is None
        self._ledgers: defaultdict[int, Ledger] = defaultdict(Ledger)
        self._linked: set[int] = set()  # peers that something was sent to
        self._last = Position(0, 0, -1)  # the last round that was posted here
        self._agreed: list[Exchange] = []  # their parts leave when all are posted, and filled
        self._listens = not getattr(transport, "by_hand", False)
        self._thread: threading.Thread | None = None  # receives while training computes
        self._error: BaseException | None = None  # of that thread
        self._later_epoch = 0  # of a peer that takes part in rounds of it
        self._accept_mail: Callable[[Header, Tensor | None], None] | None = None
        self._state: Tensor | None = None  # of the replica that this joiner begins with
        self._state_bytes = 0  # of it that have arrived
        if hasattr(transport, "receive_into"):
            transport.receive_into(self._memory_for)

    @property
    def bytes_sent(self) -> int:
        """Bytes of payloads that were posted to peers and not voided."""
        with self._lock:
            return self._posted_bytes - sum(each.kept_bytes for each in self._ledgers.values())

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, and which of the two."""
        return self._liveness.down

    def counts_without(self, exchanges: Iterable[Exchange]) -> dict[str, int]:
        """Return `bytes_sent`, `bytes_received` and `refused` as if exchanges were not posted."""
        with self._lock:
            sizes = [(each, self.plan[each.bucket].size_bytes) for each in exchanges]
            sent = sum(size_bytes for each, size_bytes in sizes if not each.ticket.is_kept)
            arrived = sum(s for each, s in sizes if each.outcome is Outcome.DELIVERED)
            return {
                "bytes_sent": self.bytes_sent - sent,
                "bytes_received": self.bytes_received - arrived,
                "refused": self.refused,
            }

    # -- rounds -----------------------------------------------------------------------------

    def post(
        self,
        round: int,
        bucket: int,
        payload: Tensor,
        *,
        send_to: int | None,
        recv_from: int | None,
        into: Tensor | None = None,
        is_filled: Callable[[], bool] | None = None,
        on_arrival: Callable[[Exchange], None] | None = None,
        ticket: Ticket | None = None,
    ) -> Exchange:
        """Say READY for a bucket; return immediately. The parts move when the partner is ready.

        A part whose receiver was ready before leaves at the next `send_agreed` or `poll`.

        Args:
            round: The round; on one link, rounds are posted in rising order.
            bucket: Index into the plan.
            payload: This rank's part: flat, contiguous, in host memory, as the plan says. It must
                not be written before `exchange.ticket.done`.
            send_to: The rank to send this part to, None for none.
            recv_from: The rank to expect a part from, None for none.
            into: Memory for the partner's part, like `payload`, where the transport can receive
                into it; it must not be used before the exchange has ended, or the partner may still
                write it after `cancel`. None: a tensor of its own.
            is_filled: Returns whether `payload` is filled (by a copy from an accelerator, say); the
                part leaves when it is, in the order of posting on each link. None: it is.
            on_arrival: Called in a background thread when the partner's part has arrived; it reads
                a part that is the partner's memory (`exchange.release`). None: that is copied. It
                may be called before this returns.
            ticket: That of the payload, which is then known before this returns.

        Returns:
            The exchange with `recv_from`; with `send_to`, delivered, if that is None.

        Raises:
            ValueError: If the payload does not fit the plan.
            GossipError: If an earlier message could not be sent.
        """
        self.plan[bucket].check(payload, bucket)
        is_member = self._liveness.is_member()
        with self._lock:
            self._check()
            self._follow_epoch(round)
            at, ticket = self._at(round), ticket or Ticket()
            receiving = Exchange(at, bucket, recv_from, recv_from is not None, ticket, into=into)
            receiving.on_arrival = on_arrival
            sending = receiving
            if send_to != recv_from:
                sending = Exchange(at, bucket, send_to, False, ticket)
            if send_to is None:
                ticket.keep()
            else:
                sending.sends, sending.payload, sending.is_filled = True, payload, is_filled
            if self.closed or not is_member:
                sending.end(Outcome.VOID)
                if sending is not receiving:
                    receiving.end(Outcome.VOID)
                if not self.closed:
                    self.void(round, send_to)  # otherwise the receiver waits for it
                return receiving
            self._last = max(self._last, at)
            for exchange in {receiving, sending}:
                if exchange.peer is not None:
                    self._post(exchange, exchange.peer)
            if recv_from is None:
                receiving.finish(Outcome.DELIVERED)
            self._listen()
        if is_filled is not None:
            self.transport.wake()  # or a part that may leave soon waits for the next message
        return receiving

    def _post(self, exchange: Exchange, peer: int) -> None:
        """Say READY to a peer; this rank's part leaves soon if that is ready, too."""
        ledger, at, bucket = self._ledgers[peer], exchange.at, exchange.bucket
        sends, is_alive = exchange.sends, self._liveness.is_alive(peer)
        if not ledger.post(exchange, window=self.window, is_alive=is_alive):
            if sends:
                self.void(at.round, peer)
            return
        self._posted_bytes += sends * self.plan[bucket].size_bytes
        self._send(peer, self._header(Kind.READY, at.round, bucket))
        if (at, bucket) in ledger.awaited:
            ledger.agree(at, bucket)
            self._agreed.append(exchange)

    def send_agreed(self) -> None:
        """Send the posted parts whose receivers are ready, if they are filled; `poll` does so, too.

        1. A posts all buckets of a round, and its READYs are at B.
        2. B posts them. If its part 0 left at once, READY 1 would wait behind it on a slow link,
           and part 1 of A for READY 1. So the round would take up to twice as long.
        """
        with self._lock:
            agreed, self._agreed = self._agreed, []
            for exchange in agreed:
                if not exchange.sends:  # it will not be sent
                    continue
                is_behind = any(each.peer == exchange.peer for each in self._agreed)
                if is_behind or not self._is_filled(exchange):
                    self._agreed.append(exchange)
                else:
                    self._leave(exchange)
            if self._error is not None:  # nothing leaves any more
                for exchange in self._agreed:
                    exchange.ticket.done = True
                self._agreed = []

    def _is_filled(self, exchange: Exchange) -> bool:
        """Whether a part may leave; one that cannot be filled is an error of this rank."""
        try:
            return exchange.is_filled is None or exchange.is_filled()
        except Exception as error:
            self._error = GossipError(f"a message could not be sent: {error}")
            self._error.__cause__ = error
            return False

    def _leave(self, exchange: Exchange) -> None:
        """Send this rank's part of an exchange that both ends are ready for."""
        at, bucket, peer = exchange.at, exchange.bucket, exchange.peer
        assert peer is not None
        header = self._header(Kind.DATA, at.round, bucket, self.plan[bucket], at.era)
        self._send(peer, header, self._ledgers[peer].leave(exchange), exchange.ticket)

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Wait for the partner's part, at most `timeout_seconds`; `LATE` leaves the exchange open.

        Raises:
            GossipError: If a part of this rank could not be sent.
        """
        deadline, left = time.perf_counter() + timeout_seconds, 0.0
        self._check()
        while exchange.open and left >= 0:
            self.poll(min(left, _WAKE_SECONDS), exchange)
            self._check()
            left = deadline - time.perf_counter()
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0, awaited: Exchange | None = None) -> None:
        """Accept messages; wait for the first at most `timeout_seconds`.

        One thread at a time receives; other threads wait until it has received what is `awaited`.
        """
        deadline = time.perf_counter() + timeout_seconds
        self.send_agreed()
        if self._agreed:
            deadline = min(deadline, time.perf_counter() + _FILL_SECONDS)
        with self._changed:

            def is_served() -> bool:
                return self._is_over or (awaited is not None and not awaited.open)

            self._changed.wait_for(lambda: self._listener is None or is_served(), timeout_seconds)
            if self._listener is not None or is_served():
                return
            self._listener = threading.get_ident()
        arrived: list[Exchange] = []
        try:
            events = self.transport.receive(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, LOST)
                    else:
                        arrived.extend(self._accept(event))
                for peer in self._peers.intersection(self._liveness.expelled()) - self.gone.keys():
                    self._lose(peer, LOST)
        finally:
            with self._changed:
                self._listener = None
                self._changed.notify_all()
        for exchange in arrived:
            if exchange.on_arrival is not None:
                exchange.on_arrival(exchange)

    def cancel(self, exchange: Exchange) -> None:
        """End an open exchange as void, on both ends if the partner has not said READY.

        Otherwise the partner counts it, and its part is dropped.
        """
        with self._lock:
            if exchange.open:
                assert exchange.peer is not None
                if self._ledgers[exchange.peer].cancel(exchange):
                    at, bucket = exchange.at, exchange.bucket
                    header = self._header(Kind.WITHDRAW, at.round, bucket, era=at.era)
                    self._send(exchange.peer, header)

    def report_silent(self, peer: int) -> None:
        """Note that a peer is silent, and notify the others; once, until it is heard of again."""
        with self._lock:
            if peer not in self.silent:
                self.silent.add(peer)
                for other in self._linked - {peer}:
                    self._send(other, self._header(Kind.SILENT, 0, peer))

    def void(self, round: int, send_to: int | None) -> None:
        """Void a round before any part of it was sent, and notify `send_to`."""
        if send_to is None:
            return
        with self._lock:
            ledger, at = self._ledgers[send_to], self._at(round)
            if self._liveness.is_alive(send_to) and at > ledger.told:
                ledger.told = at
                ledger.prune(before=at.next)
                self._notify(Kind.VOID, [send_to], round)

    # -- collectives and generations --------------------------------------------------------

    def fence(self) -> int:
        """Begin a collective: enter the next epoch, notify all peers, and return the epoch.

        This rank says READY to no further round of earlier epochs. Partners that are rounds ahead
        see those rounds as void instead of waiting for this rank; an exchange that both ends are
        ready for still counts. If the collective fails, rounds continue in this epoch: a peer that
        has not entered it does so after its first round with this rank, which is void.
        """
        with self._lock:
            self._enter_era(self.generation, self.epoch + 1)
            self._notify(Kind.FENCE, self._peers, 0)
            return self.epoch

    def resume(self, epochs: Mapping[int, int], next_round: int) -> None:
        """End a collective that all ranks entered; in a later epoch the round may be lower.

        Args:
            epochs: The epoch that `fence` returned on each rank, or a later one.
            next_round: The next round, equal on all ranks.
        """
        with self._lock:
            self._enter_era(self.generation, max(epochs.values()))
            self.heard = next_round - 1
            for peer in epochs.keys() - {self.rank}:
                # Its FENCE may arrive after the end of this collective.
                self._ledgers[peer].latest = max(self._ledgers[peer].latest, self._at(0))

    def enter(self, generation: int, next_round: int, living: Collection[int]) -> None:
        """Enter another generation from `next_round` on, and notify its members.

        An exchange in flight with a member counts if both were ready before they entered; one
        with any other rank is over. Rounds with a peer are void until it has entered, too. Broken
        links between living ranks are reopened.
        """
        with self._lock:
            assert generation > self.generation, f"generation {generation} is no later one"
            peers = {*living} - {self.rank}
            for peer in peers:
                if self.gone.get(peer) == LOST:
                    self._liveness.report_reopened(peer)
                    self._posted_bytes -= self._ledgers[peer].kept_bytes
                    self._ledgers[peer] = Ledger()
            self._peers |= peers
            self._enter_era(generation, 0)
            if self._arrived:
                self._notify(Kind.FENCE, living, next_round)

    def arrive(self, next_round: int, living: Collection[int]) -> None:
        """Take part from `next_round` on as a joiner, and notify the others.

        Before that, rounds with this rank are void immediately on all of them.
        """
        with self._lock:
            self._arrived = True
            self._notify(Kind.FENCE, living, next_round)

    def replan(self, plan: Sequence[Part]) -> None:
        """Continue with other buckets; all ranks together, between rounds, with nothing open."""
        with self._lock:
            for ledger in self._ledgers.values():
                assert not ledger.posted, "exchanges are open"
            self.plan = tuple(plan)

    def close(self, linger_seconds: float = 2.0) -> None:
        """Send LEAVE on every link and close; open exchanges end as `VOID`; local.

        Posted parts are still sent, for at most `linger_seconds`.
        """
        if os.getpid() != self._process:
            return  # a forked child: the links belong to its parent
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for ledger in self._ledgers.values():
                for exchange in ledger.all_posted():
                    if exchange.receives:
                        ledger.cancel(exchange)
        deadline = time.perf_counter() + linger_seconds
        try:
            self.poll(0.0)
            while not self._is_all_sent() and time.perf_counter() < deadline:
                self.poll(0.005)
        finally:
            self._end(max(min(_LEAVE_SECONDS, linger_seconds), deadline - time.perf_counter()))

    # -- mail -------------------------------------------------------------------------------

    def attach(self, accept: Callable[[Header, Tensor | None], None]) -> None:
        """Call `accept` for all mail from now on; it must not block, and may raise `WireError`."""
        with self._lock:
            assert self._accept_mail is None, "a channel has one mailbox"
            self._accept_mail = accept

    def watch(self, peer: int) -> None:
        """Open the link to a peer, to notice its death even before anything is sent."""
        with self._lock:
            self.transport.open(peer)
            self._linked.add(peer)

    def send_mail(
        self, key: int, version: int, values: Tensor, peers: Iterable[int]
    ) -> list[Ticket]:
        """Send a version of a mailbox's tensor to living peers; return immediately."""
        part = Part(values.dtype, values.numel())
        header = self._header(Kind.MAIL, version, key, part)
        with self._lock:
            if self.closed:
                return []
            living = [p for p in {*peers} - {self.rank} if self._liveness.is_alive(p)]
            self._posted_bytes += len(living) * header.size_bytes
            tickets = [Ticket() for _ in living]
            for peer, ticket in zip(living, tickets, strict=True):
                self._send(peer, header, values, ticket)
            return tickets

    def send_state(self, state: Tensor, peer: int) -> None:
        """Send a joiner a replica's state, as bytes in host memory; return immediately."""
        for piece in state.split(_PIECE_BYTES):
            header = self._header(Kind.STATE, state.numel(), 0, Part(piece.dtype, piece.numel()))
            with self._lock:
                if not self.closed:
                    self._posted_bytes += piece.numel()
                    self._send(peer, header, piece)

    def received_state(self) -> tuple[Tensor | None, int]:
        """Return the state that this joiner is sent, once it is whole, and how much has arrived."""
        with self._lock:
            if self._state is None or self._state_bytes < self._state.numel():
                return None, self._state_bytes
            whole, self._state = self._state, None
            return whole, self._state_bytes

    # -- messages ---------------------------------------------------------------------------

    def _at(self, round: int) -> Position:
        return Position(self.generation, self.epoch, round)

    def _header(
        self,
        kind: Kind,
        round: int,
        bucket: int = 0,
        part: Part | None = None,
        era: tuple[int, int] | None = None,
    ) -> Header:
        dtype, size_bytes = (None, 0) if part is None else (part.dtype, part.size_bytes)
        era = era or (self.generation, self.epoch)
        return Header(kind, self.run, self.rank, *era, round, bucket, dtype, size_bytes)

    def _send(
        self,
        peer: int,
        header: Header,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        if self._liveness.is_alive(peer):
            self._linked.add(peer)
            self.transport.send(peer, header.pack(), payload, ticket)
        elif ticket is not None:
            ticket.done = True

    def _notify(self, kind: Kind, peers: Iterable[int], round: int) -> None:
        for peer in {*peers} - {self.rank}:
            self._send(peer, self._header(kind, round))

    def _listen(self) -> None:
        """Receive in a thread, too: a part leaves when the partner's READY arrives."""
        if self._thread is None and self._listens:
            self._thread = threading.Thread(
                target=self._receive, name="gossipgrad-channel", daemon=True
            )
            self._thread.start()

    def _receive(self) -> None:
        try:
            while not self.closed:
                self.poll(_LISTEN_SECONDS)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _enter_era(self, generation: int, epoch: int) -> None:
        if generation > self.generation:
            self._later_epoch = 0
        self.generation, self.epoch = generation, epoch
        for ledger in self._ledgers.values():
            ledger.prune(before=self._at(0))

    def _follow_epoch(self, round: int) -> None:
        """Enter the epoch of a peer whose collective failed; between two rounds."""
        if self._later_epoch > self.epoch and self._at(round) > self._last:
            self._enter_era(self.generation, self._later_epoch)

    def _read(self, arrival: Received) -> tuple[Header, Tensor | None]:
        """Return the header and payload of a message of this run, or raise `WireError`."""
        header, payload = Header.unpack(arrival.header), arrival.payload
        if header.run != self.run:
            raise WireError("it belongs to another run")
        # A joiner may send before this rank knows its generation.
        is_known = header.sender in self._peers or header.generation > self.generation
        if header.sender == self.rank or not is_known:
            raise WireError(f"rank {header.sender} is no peer of this run")
        is_planned = header.round >= 0 and header.bucket < len(self.plan)
        if header.kind in (Kind.DATA, Kind.READY, Kind.WITHDRAW) and not is_planned:
            raise WireError(f"round {header.round}, bucket {header.bucket} is not in the plan")
        if header.kind is Kind.DATA:
            payload = self.plan[header.bucket].read(header, payload)
        elif payload is not None and header.kind not in (Kind.MAIL, Kind.STATE):
            raise WireError(f"a {header.kind.name} message carries no payload")
        elif payload is not None and arrival.release is not None:
            payload = payload.clone()
        return header, payload

    def _memory_for(self, header_bytes: bytes, size_bytes: int) -> Tensor | None:
        """Return the posted memory for a part that arrives, as bytes; in the transport's thread."""
        try:
            header = Header.unpack(header_bytes)
        except WireError:
            return None
        if header.kind is not Kind.DATA or header.run != self.run:
            return None
        at = Position(header.generation, header.epoch, header.round)
        with self._lock:
            ledger = self._ledgers.get(header.sender)
            exchange = None if ledger is None else ledger.find(at, header.bucket)
            if exchange is None or not exchange.receives:
                return None
            into, exchange.into = exchange.into, None  # once
            return None if into is None or into.nbytes != size_bytes else into.view(torch.uint8)

    def _accept(self, arrival: Received) -> list[Exchange]:
        """Handle a message; return the exchange whose part it was, if any."""
        exchange = None
        try:
            header, payload = self._read(arrival)
            if header.generation > self.generation:
                self._liveness.report_generation(header.generation)
            exchange = self._handle(header, payload, arrival.release)
        except WireError as error:
            self.refused += 1
            logger.debug("rank %d dropped a message: %s", self.rank, error)
        if arrival.release is not None and (exchange is None or exchange.release is None):
            arrival.release()
        return [] if exchange is None else [exchange]

    def _handle(
        self, header: Header, payload: Tensor | None, release: Callable[[], None] | None
    ) -> Exchange | None:
        """Handle a message of this run; return the exchange whose part it was, if any."""
        kind, peer = header.kind, header.sender
        ledger = self._ledgers[peer]
        if (how := self.gone.get(peer)) is not None:
            raise WireError(f"rank {peer} {how}")
        at = Position(header.generation, header.epoch, header.round)
        self.silent.discard(peer)
        if kind is Kind.SILENT:
            self.silent |= {header.bucket} & self._peers
        elif kind is Kind.MAIL:
            if self._accept_mail is None:
                raise WireError("there is no mailbox")
            self._accept_mail(header, payload)
        elif kind is Kind.STATE:
            if self._arrived or payload is None:
                raise WireError("this rank waits for no state")
            if self._state is None:
                self._state = torch.empty(header.round, dtype=torch.uint8, device="cpu")
            first, self._state_bytes = self._state_bytes, self._state_bytes + payload.numel()
            self._state[first : self._state_bytes] = payload
        elif kind is Kind.LEAVE:
            self._lose(peer, LEFT)
        elif kind is Kind.WITHDRAW:
            ledger.take_back(at, header.bucket)
        elif kind is Kind.DATA:
            assert payload is not None
            self.bytes_received += header.size_bytes
            posted = ledger.find(at, header.bucket)
            if release is not None and (posted is None or posted.on_arrival is None):
                payload, release = payload.clone(), None
            return ledger.deliver(at, header.bucket, payload, release)
        else:
            ledger.advance(at.next if kind is Kind.VOID else at)
            if at >= self._at(0):  # in an earlier era the sender may be a lost rank
                self.heard = max(self.heard, header.round)
            if kind is not Kind.FENCE and header.generation == self.generation:
                self._later_epoch = max(self._later_epoch, header.epoch)
            if kind is Kind.READY and (exchange := ledger.agree(at, header.bucket)) is not None:
                self._agreed.append(exchange)
                self.send_agreed()
        return None

    def _lose(self, peer: int, how: str) -> None:
        ledger = self._ledgers[peer]
        self.transport.forget(peer)
        if peer in self.gone:
            return
        # Once this rank has left, the others end their links.
        level = logging.INFO if how == LEFT or self.closed else logging.WARNING
        logger.log(level, "rank %d %s; rank %d continues without it", peer, how, self.rank)
        ledger.end()
        self.silent.discard(peer)
        self._linked.discard(peer)
        self._liveness.report_down(peer, how)

    # -- the end ----------------------------------------------------------------------------

    def _is_all_sent(self) -> bool:
        with self._lock:
            waits = any(e.sends for each in self._ledgers.values() for e in each.all_posted())
            return self._error is not None or not waits

    def _end(self, linger_seconds: float) -> None:
        """Send LEAVE and close the transport, when no other thread receives."""
        try:
            with self._lock:
                linked = {*self._linked, *getattr(self.transport, "linked", ())}
                self._notify(Kind.LEAVE, linked, 0)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
                # An unclosed session may be collected, and so closed, in its receiving thread.
                has_ended = self._changed.wait_for(
                    lambda: self._listener in (None, threading.get_ident()), _END_SECONDS
                )
            if has_ended:
                self.transport.close(linger_seconds)
            else:
                logger.warning("a thread still receives: rank %d leaves its links open", self.rank)
