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
from gossipgrad.comm._membership import Liveness
from gossipgrad.comm._outbox import Outbox
from gossipgrad.comm._transport import Lost, Received, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind, Part, WireError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 2.0  # until the others have read LEAVE, which their threads of links do at once
_LEFT = "left"
_WAKE_SECONDS = 0.5  # a wait wakes this often, to notice Ctrl-C and silent deaths
_END_SECONDS = 5.0  # for another thread to end its wait, which takes `_WAKE_SECONDS`


class Channel:
    """Exchanges buckets with partners, one round after the other.

    An exchange counts iff both ends sent their part, in the same era: a generation of the
    membership and an epoch (between two collectives) in it. A rank voids a round only before
    sending, and notifies the partner. Every message is checked against the plan before it is kept:
    run, sender, bucket, dtype and size; any other is dropped and counted in `refused`.

    When a peer is late, `take` returns `LATE` at the deadline and the exchange stays open. When it
    died or left, its open exchanges end as `DEAD_PEER`; no call raises for that.

    Args:
        transport: Moves the bytes.
        run: 16 bytes that identify this run's messages.
        plan: dtype and size of each bucket, equal on all ranks.
        credits: Rounds that may be open on one link; a further one is void immediately. This bounds
            the memory: `credits + 1` snapshots.
        generation: The generation of this rank's membership at the start.
        liveness: Notified of ranks that left or died, and of later generations.
        peers: For a joiner, the living ranks; it takes part in rounds after `arrive`. None: all
            ranks of the transport, which start together.

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
        self._is_over = False  # no thread receives any more
        self._liveness = liveness or Liveness()
        # All other ranks that were members of a generation that this rank was in.
        self._peers = set(range(self.world_size) if peers is None else peers) - {self.rank}
        self._arrived = peers is None
        self._ledgers: defaultdict[int, Ledger] = defaultdict(Ledger)
        self._outboxes: dict[int, Outbox] = {}  # of links that are open
        self._grants = Grants(self._changed, self._ledgers, self._say)
        self._last = -1  # position of the last round that was posted here
        self._later_epoch = 0  # of a peer that takes part in rounds of it
        self._accept_mail: Callable[[Header, Tensor | None], None] | None = None

    @property
    def early_bytes(self) -> int:
        """Bytes of the parts that arrived before this rank posted their round."""
        with self._lock:
            return sum(
                part.nbytes
                for ledger in self._ledgers.values()
                for of_round in ledger.early.values()
                for part in of_round.values()
            )

    @property
    def gone(self) -> dict[int, str]:
        """Ranks that left or were lost, and which of the two."""
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
        """Send this rank's part of a bucket and expect the partner's; return immediately.

        Args:
            round: The round; on one link, rounds are posted in rising order.
            bucket: Index into the plan.
            payload: Flat, contiguous, in host memory, as the plan says. It must not be written
                before `exchange.ticket.done`.
            send_to: The rank to send this part to, None for none.
            recv_from: The rank to expect a part from, None for none.
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
                if not self.closed:
                    self.void(round, send_to)  # otherwise the receiver waits for it
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
        """Return a function that delays a part until earlier rounds no longer use the link.

        A background thread calls it before sending. It returns when the receiver's link is free,
        the round is void, or the seconds passed to it are over.
        """
        return self._grants.turn(send_to, self._place(round))

    def take(self, exchange: Exchange, timeout_seconds: float) -> Outcome:
        """Wait for the partner's part, at most `timeout_seconds`; `LATE` leaves the exchange open.

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
        """Accept messages; wait for the first at most `timeout_seconds`.

        One thread at a time receives; other threads wait until it has received what is `awaited`.
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
        """End an open exchange as void; the partner's part is dropped if it arrives."""
        with self._lock:
            if exchange.open:
                assert exchange.recv_from is not None
                self._ledgers[exchange.recv_from].cancel(exchange)

    def void(self, round: int, send_to: int | None) -> None:
        """Void a round before any part of it was sent, and notify `send_to`."""
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
        """Begin a collective: enter the next epoch, notify all peers, and return the epoch.

        This rank sends no further part of earlier epochs. Partners that are rounds ahead see those
        rounds as void instead of waiting for this rank; an exchange that both ends sent still
        counts. If the collective fails, rounds continue in this epoch: a peer that has not entered
        it does so after its first round with this rank, which is void.
        """
        with self._lock:
            self._enter_era(self.generation, self.epoch + 1)
            self._notify(Kind.FENCE, self._peers, 0)
            return self.epoch

    def resume(self, epochs: Mapping[int, int], next_round: int) -> None:
        """End a collective that all ranks entered.

        Args:
            epochs: The epoch that `fence` returned on each rank.
            next_round: The next round, equal on all ranks.
        """
        with self._lock:
            self._enter_era(self.generation, max(epochs.values()))
            self.heard = next_round - 1
            for peer in epochs.keys() - {self.rank}:
                # Its FENCE may arrive after the end of this collective.
                self._ledgers[peer].latest = max(self._ledgers[peer].latest, self._place(0))

    def restart(self, next_round: int, members: Iterable[int]) -> None:
        """Restart at a lower round in a new epoch; all ranks together, after a collective."""
        self.resume(dict.fromkeys(members, self.epoch + 1), next_round)

    def enter(self, generation: int, next_round: int, living: Collection[int]) -> None:
        """Enter another generation from `next_round` on, and notify its members.

        An exchange in flight with a member counts if both sent their part before they entered; one
        with any other rank is over. Rounds with a peer are void until it has entered, too. Broken
        links between living ranks are reopened.
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
                assert not ledger.open, "exchanges are open"
                ledger.early.clear()
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
            self._grants.release(self._last)
            for ledger in self._ledgers.values():
                for of_round in [*ledger.open.values()]:
                    for exchange in [*of_round.values()]:
                        ledger.cancel(exchange)
        deadline = time.perf_counter() + linger_seconds
        with ExitStack() as at_last:  # in reverse order; all run, even after an interrupt
            at_last.callback(self._end, min(_LEAVE_SECONDS, linger_seconds))
            at_last.callback(self._drain, deadline)
            self.poll(0.0)
            while not self._is_all_sent() and time.perf_counter() < deadline:
                self.poll(0.005)

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
            self._outbox(peer)

    def send_mail(
        self, key: int, version: int, values: Tensor, peers: Iterable[int]
    ) -> list[Ticket]:
        """Send a version of a mailbox's tensor to living peers; return immediately."""
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
        """Send `ASK` or `GO` for a round of this era, ahead of waiting parts."""
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
        """Enter the epoch of a peer whose collective failed; between two rounds."""
        if self._later_epoch > self.epoch and self._place(round) > self._last:
            self._enter_era(self.generation, self._later_epoch)

    def _read(self, arrival: Received) -> tuple[Header, Tensor | None]:
        """Return the header and payload of a message of this run.

        Raises:
            WireError: It belongs to no such message, or does not fit the plan.
        """
        header, payload = Header.unpack(arrival.header), arrival.payload
        if header.run != self.run:
            raise WireError("it belongs to another run")
        # A joiner may send before this rank knows its generation.
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
        """Handle a message of this run.

        Raises:
            WireError: Its sender is gone, or its payload cannot be kept.
        """
        kind, peer = header.kind, header.sender
        ledger = self._ledgers[peer]
        if ledger.gone is not None:
            is_last = kind in (Kind.LEAVE, Kind.PART)
            if ledger.gone == LOST and not ledger.was_notified and not is_last:
                # Only our link to it broke, not its link to us: notify it, or it waits for us.
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
            if header.generation >= self.generation:  # otherwise the link was reopened since
                ledger.was_notified = True
                self._lose(peer, LOST)
        elif kind in (Kind.ASK, Kind.GO):
            self._grants.hear(kind, peer, at)
        else:
            ledger.advance(at + 1 if kind is Kind.VOID else at)
            if at >= self._place(0):  # in an earlier era the sender may be a lost rank
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
        logger.log(level, "rank %d %s; rank %d continues without it", peer, how, self.rank)
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
        """Send LEAVE and close the transport, when no other thread receives."""
        try:
            with self._lock:
                self._notify(Kind.LEAVE, [*self._outboxes], 0)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
                # An unclosed session may be collected, and so closed, in its receiving thread.
                has_ended = self._changed.wait_for(
                    lambda: self._listener in (None, threading.get_ident()), _END_SECONDS
                )
            if has_ended:
                self.transport.close(leave_seconds)
            else:
                logger.warning("a thread still receives: rank %d leaves its links open", self.rank)
