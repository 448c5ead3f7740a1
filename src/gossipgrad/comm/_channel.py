"""A channel: the protocol of exchanges, over any transport."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torch import Tensor

from gossipgrad.comm._exchange import Exchange, Outcome
from gossipgrad.comm._grants import Grants
from gossipgrad.comm._ledger import LOST, Ledgers, era_of, place
from gossipgrad.comm._news import News
from gossipgrad.comm._outbox import Outbox
from gossipgrad.comm._part import Part, check_planned, check_run, read, values_of
from gossipgrad.comm._transport import Arrival, Lost, Ticket, Transport
from gossipgrad.comm._turn import Turn
from gossipgrad.comm._wire import Header, Kind, WireError

__all__ = ["Channel"]

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.2  # for the last message; a peer that misses it sees the link go down
_LEFT = "left"
_WAKE_SECONDS = 0.5  # a wait wakes this often, so that Ctrl-C and silent deaths are seen


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
        news: Is notified of who is gone, and of later generations.
        peers: The ranks that live, where this one joins others: it does not say that it enters
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
        self.plan, self.credits = tuple(plan), credits
        self.generation, self.epoch = generation, 0
        self.refused = self.bytes_received = 0
        self.transport, self.run = transport, run
        self._lock = threading.RLock()
        self._news = news or News()
        self._turn = Turn()
        self._ledgers = Ledgers(self.rank, range(self.world_size) if peers is None else peers)
        self._arrived = peers is None
        self._outbox = Outbox(
            transport, self._lock, gone=lambda peer: self._ledgers[peer].gone is not None
        )
        self._grants = Grants(self._lock, self._ledgers, self._say)
        self._last = -1  # place of the last round that was posted here
        self._accept_mail: Callable[[Header, Tensor | None], bool] | None = None
        self._in_collective = False
        self._later_epoch = 0  # of a peer that takes part in rounds of it
        self.heard = -1  # the highest round that a message has named
        self.closed, self._process = False, os.getpid()

    @property
    def early_bytes(self) -> int:
        """Memory of what arrived before this rank posted its round."""
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
        """
        check_planned(bucket, payload, self.plan)
        is_member = self._news.is_member()
        with self._lock:
            self._follow_epoch(round)
            at = self._place(round)
            exchange = Exchange(round, bucket, send_to, recv_from, at=at)
            if self.closed or not is_member:
                exchange.finish(Outcome.VOID)
                return exchange
            self._last = max(self._last, at)
            self._grants.answer(era_of(self._place(0)), self._last)
            header = self._header(Kind.DATA, round, bucket)
            if send_to is not None and send_to != recv_from:
                receiver = self._ledgers[send_to]
                if receiver.is_absent or at <= receiver.given_up:
                    self.void(round, send_to)
                    exchange.send_to = None
            if recv_from is None:
                self._outbox.part(exchange, header, payload, ready)
                exchange.finish(Outcome.DELIVERED)
                return exchange
            ledger = self._ledgers[recv_from]
            assert (at, bucket) not in ledger.open, f"round {round} is posted twice"
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
                self.transport.open(recv_from)
                self._outbox.linked.add(recv_from)
            self._outbox.part(exchange, header, payload, ready)
            if early is not None:
                exchange.finish(Outcome.DELIVERED, early)
            elif refusal is None:
                ledger.open[at, bucket] = exchange
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
            self._outbox.check()
            left = deadline - time.perf_counter()
        return exchange.outcome

    def poll(self, timeout_seconds: float = 0.0, awaited: Exchange | None = None) -> None:
        """Accepts what has arrived; waits for the first message at most `timeout_seconds`.

        One thread at a time listens, and may serve those that wait beside it for what is `awaited`.
        """
        deadline = time.perf_counter() + timeout_seconds
        with self._turn.take(
            lambda: awaited is not None and not awaited.open, timeout_seconds
        ) as mine:
            if not mine:
                return
            events = self.transport.receive(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                for event in events:
                    if isinstance(event, Lost):
                        self._lose(event.peer, LOST)
                    else:
                        self._accept(event)
                for peer in self._ledgers.alive(self._news.expelled()):
                    self._lose(peer, LOST)
                self._grants.answer(era_of(self._place(0)), self._last)

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
                ledger.give_up(at)
                self._grants.release(at)
                self._notify(Kind.VOID, [send_to], round)

    # -- collectives and generations --------------------------------------------------------

    def fence(self) -> tuple[int, int]:
        """Begins a collective: enters the next epoch, and notifies everyone.

        Nothing more is sent of earlier epochs. So partners that are rounds ahead see those rounds
        as void instead of waiting for this rank, and what both ends have sent still counts.

        Returns:
            The epoch, and the place of the last round that this rank has posted, for `resume`.
        """
        with self._lock:
            self._grants.release(self._last)
            self._in_collective = True
            self.epoch += 1
            self._notify(Kind.FENCE, self._ledgers.peers, 0)
            return self.epoch, self._last

    def resume(self, fences: Mapping[int, Sequence[int]], next_round: int) -> None:
        """Ends a collective that all ranks have entered.

        Args:
            fences: What `fence` returned on each rank. What is open past its last round was never
                sent, and is void, like all that is open with others.
            next_round: Where rounds go on, equal on all ranks.
        """
        with self._lock:
            self._in_collective = False
            self.epoch = max(epoch for epoch, _ in fences.values())
            self.heard = next_round - 1
            last = {rank: place for rank, (_, place) in fences.items()}
            self._ledgers.resume(self._place(next_round), last)

    def restart(self, next_round: int, members: Iterable[int]) -> None:
        """After a collective, all ranks at once: rounds go on by lower numbers, in a new epoch."""
        self.resume(dict.fromkeys(members, (self.epoch + 1, -1)), next_round)

    def abort(self) -> None:
        """Ends a collective that failed: rounds go on in this epoch, once peers have entered it."""
        with self._lock:
            self._in_collective = False
            last = max(0, self._last - self._place(0))
            self._notify(Kind.ENTER, self._ledgers.peers, last)

    def enter(self, generation: int, next_round: int, living: Collection[int]) -> None:
        """Lives in another membership from `next_round` on, and notifies those who live in it.

        What is in flight with them counts if both have sent their part before they entered; with
        others it is over. Rounds with a peer are void until it has said that it entered, too. Links
        that broke between those who live are made anew.
        """
        with self._lock:
            assert generation > self.generation, f"generation {generation} is no later one"
            self.generation, self.epoch, self._later_epoch = generation, 0, 0
            self._grants.release(self._last)
            self._ledgers.enter(living, reopens=getattr(self.transport, "reopens", False))
            if self._arrived:
                self._notify(Kind.ENTER, living, next_round)

    def arrive(self, next_round: int, living: Collection[int]) -> None:
        """Takes part from `next_round` on, where this rank has joined others, and notifies them.

        Until then rounds with it are void at once on all of them.
        """
        with self._lock:
            self._arrived = True
            self._notify(Kind.ENTER, living, next_round)

    def replan(self, plan: Sequence[Part]) -> None:
        """Goes on with other buckets; nothing may be open, and all ranks do it between rounds."""
        with self._lock:
            assert not any(ledger.open for ledger in self._ledgers.values()), "exchanges are open"
            for ledger in self._ledgers.values():
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
            self.closed = self._grants.over = True
            for ledger in self._ledgers.values():
                ledger.cancel_all()
        deadline = time.perf_counter() + linger_seconds
        with ExitStack() as at_last:  # the first comes last; all run, even in an interrupt
            at_last.callback(self._end, min(_LEAVE_SECONDS, linger_seconds))
            at_last.callback(lambda: self._outbox.drain(max(0.0, deadline - time.perf_counter())))
            self.poll(0.0)
            while not self._outbox.empty and time.perf_counter() < deadline:
                self.poll(0.005)

    # -- mail -------------------------------------------------------------------------------

    def attach(self, accept: Callable[[Header, Tensor | None], bool]) -> None:
        """Calls `accept` for all mail from now on; it returns whether it fits, and at once."""
        with self._lock:
            assert self._accept_mail is None, "a channel has one mailbox"
            self._accept_mail = accept

    def send_mail(
        self, key: int, version: int, values: Tensor, peers: Iterable[int]
    ) -> list[Ticket]:
        """Sends a version of a mailbox's tensor to peers that are not gone; returns at once."""
        bare = self._header(Kind.MAIL, version)
        header = replace(bare, bucket=key, dtype=values.dtype, size_bytes=values.nbytes)
        with self._lock:
            if self.closed:
                return []
            return [self._outbox.mail(peer, header, values) for peer in {*peers} - {self.rank}]

    # -- messages ---------------------------------------------------------------------------

    def _place(self, round: int) -> int:
        return place(self.generation, self.epoch, round)

    def _header(self, kind: Kind, round: int, bucket: int = 0) -> Header:
        part = self.plan[bucket] if kind is Kind.DATA else None
        return Header(
            kind,
            self.run,
            self.rank,
            self.generation,
            self.epoch,
            round,
            bucket,
            None if part is None else part.dtype,
            0 if part is None else part.size_bytes,
        )

    def _notify(self, kind: Kind, peers: Iterable[int], round: int) -> None:
        self._outbox.notify(self._header(kind, round), set(peers) - {self.rank})

    def _say(self, kind: Kind, peer: int, at: int) -> None:
        self._notify(kind, [peer], at - self._place(0))

    def _follow_epoch(self, round: int) -> None:
        """Enters, between two rounds, the epoch of a peer whose collective has failed."""
        if self._in_collective or self._later_epoch <= self.epoch:
            return
        if self._place(round) > self._last:
            self.epoch = self._later_epoch
            self._notify(Kind.ENTER, self._ledgers.peers, round)

    def _accept(self, arrival: Arrival) -> None:
        try:
            may_send = partial(self._ledgers.may_send, here=self.generation)
            header = read(arrival, self.plan, run=self.run, rank=self.rank, may_send=may_send)
        except WireError as error:
            self.refused += 1
            logger.debug("rank %d dropped a message: %s", self.rank, error)
            return
        kind, peer = header.kind, header.sender
        ledger = self._ledgers[peer]
        if header.generation > self.generation:
            self._news.ahead(header.generation)
        if ledger.gone is not None:
            self.refused += 1
            is_last = kind in (Kind.LEAVE, Kind.PART)
            if ledger.gone == LOST and not ledger.was_notified and not is_last:
                # Our link to it broke, not its to us: without a message it would wait for us.
                ledger.was_notified = True
                self.transport.send(peer, self._header(Kind.PART, 0).pack())
            return
        if kind is Kind.MAIL:
            accept = self._accept_mail
            self.refused += accept is None or not accept(header, arrival.payload)
            return
        if kind is Kind.LEAVE:
            self._lose(peer, _LEFT)
            return
        if kind is Kind.PART:
            if header.generation >= self.generation:  # else the link was made anew since
                ledger.was_notified = True
                self._lose(peer, LOST)
            return
        at = place(header.generation, header.epoch, header.round)
        if kind in (Kind.ASK, Kind.GO):
            self._grants.hear(kind, peer, at)
            return
        ledger.advance(at)
        if kind is Kind.FENCE:
            return
        ledger.is_absent = False
        if header.generation == self.generation:
            self._later_epoch = max(self._later_epoch, header.epoch)
        if at >= self._place(0):  # of an earlier era it may be of a rank that is lost
            self.heard = max(self.heard, header.round)
        if kind is Kind.VOID:
            ledger.void(at)
        elif kind is Kind.DATA:
            self.bytes_received += header.size_bytes
            values = values_of(header, arrival.payload, self.plan)
            here = era_of(self._place(0))
            self.refused += not ledger.deliver(at, header.bucket, values, here=here)

    def _lose(self, peer: int, how: str) -> None:
        ledger = self._ledgers[peer]
        self.transport.forget(peer)
        if ledger.gone is not None:
            return
        level = logging.INFO if how == _LEFT else logging.WARNING
        logger.log(level, "rank %d %s; rank %d goes on without it", peer, how, self.rank)
        ledger.end(how, keep_early=how == _LEFT)
        self._news.gone(peer, left=how == _LEFT)

    def _end(self, leave_seconds: float) -> None:
        """Sends LEAVE and closes the transport."""
        try:
            with self._lock:
                self._notify(Kind.LEAVE, self._outbox.linked, 0)
        finally:
            if self._turn.end():
                self.transport.close(leave_seconds)
