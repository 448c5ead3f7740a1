"""What a channel sends: parts and words, in order on each link, and whether they have left."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._exchange import Exchange
from gossipgrad.comm._transport import Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind
from gossipgrad.errors import GossipError

__all__ = ["Outbox"]

_OF_NO_ORDER = (Kind.ASK, Kind.GO)
_IDLE_SECONDS = 5.0  # a thread that had nothing to wait for so long ends


@dataclass(slots=True, eq=False)
class _Deferred:
    """A message that waits for its buffer or behind one that does, and its ticket."""

    header: bytes
    payload: Tensor | None
    ready: Callable[[], None] | None
    ticket: Ticket | None = None
    sent: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        self.sent.wait(timeout_seconds)
        return self.ticket is not None and self.ticket.wait(max(0.0, deadline - time.monotonic()))


class _Queue:
    """The messages of one link, in order; a thread waits for buffers that are not filled yet.

    A message leaves at once unless one waits before it: a link that never waits has no thread.
    """

    def __init__(
        self, lock: threading.RLock, transmit: Callable[[bytes, Tensor | None], Ticket]
    ) -> None:
        self.waiting: deque[_Deferred] = deque()  # the first is what the thread is at
        self.error: BaseException | None = None
        self.closed = False
        self.thread: threading.Thread | None = None
        self.changed = threading.Condition(lock)
        self._transmit = transmit

    def send(
        self, header: bytes, payload: Tensor | None, ready: Callable[[], None] | None
    ) -> Ticket:
        """Sends at once, or when `ready` has returned; the lock is held."""
        if self.error is not None and not self.closed:
            return Sent()  # what came behind the part that is missing would be misread
        if self.closed or (ready is None and not self.waiting):
            return self._transmit(header, payload)
        deferred = _Deferred(header, payload, ready)
        self.waiting.append(deferred)
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="gossipgrad-sender", daemon=True)
            self.thread.start()
        self.changed.notify_all()
        return deferred

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.waiting, _IDLE_SECONDS)
                if not self.waiting:
                    self.thread = None
                    return
                deferred = self.waiting[0]
            try:
                if deferred.ready is not None and self.error is None:
                    deferred.ready()
            except BaseException as error:
                self.error = error
            with self.changed:
                try:
                    if self.error is None:
                        deferred.ticket = self._transmit(deferred.header, deferred.payload)
                except BaseException as error:
                    self.error = error
                deferred.ticket = deferred.ticket or Sent()
                deferred.sent.set()
                self.waiting.popleft()
                self.changed.notify_all()


class Outbox:
    """Sends to peers that are not gone.

    Each link has its own queue: a part that waits for its buffer or its turn holds up its own
    link only.

    Args:
        transport: Moves the bytes.
        lock: The channel's: held by whoever calls, and taken by the threads that send later.
        gone: Whether a peer is gone.

    Attributes:
        linked: Peers to whom something was sent, or from whom something is awaited.
        bytes_sent: Of payloads.
    """

    def __init__(
        self,
        transport: Transport,
        lock: threading.RLock,
        *,
        gone: Callable[[int], bool],
    ) -> None:
        self.linked: set[int] = set()
        self.bytes_sent = 0
        self._transport = transport
        self._lock = lock
        self._gone = gone
        self._queues: dict[int, _Queue] = {}
        self._tickets: list[tuple[int, Ticket]] = []

    def part(
        self,
        exchange: Exchange,
        header: Header,
        payload: Tensor,
        ready: Callable[[], None] | None,
    ) -> None:
        """Sends this rank's part of an exchange, which gets the ticket.

        Raises:
            GossipError: An earlier message could not be sent.
        """
        peer = exchange.send_to
        if peer is None or self._gone(peer):
            exchange.ticket = Sent()
            return
        self.check()
        exchange.ticket = self._send(peer, header.pack(), payload, ready)
        self.linked.add(peer)
        self._tickets = [(to, t) for to, t in self._tickets if not t.done]
        self._tickets.append((peer, exchange.ticket))
        self.bytes_sent += header.size_bytes

    def mail(self, peer: int, header: Header, payload: Tensor) -> Ticket:
        """Sends a message with a payload that belongs to no exchange."""
        if self._gone(peer):
            return Sent()
        self.linked.add(peer)
        self.bytes_sent += header.size_bytes
        return self._send(peer, header.pack(), payload, None)

    def notify(self, header: Header, peers: Iterable[int]) -> None:
        """Sends a message without payload; one of no order past those that wait for buffers."""
        for peer in peers:
            if not self._gone(peer):
                if header.kind in _OF_NO_ORDER:
                    self._transmit(peer, header.pack(), None)
                else:
                    self._send(peer, header.pack(), None, None)
                self.linked.add(peer)

    def check(self) -> None:
        """Raises what kept a message that waited for its buffer from being sent.

        Raises:
            GossipError: If there was such a thing.
        """
        for queue in [*self._queues.values()]:
            if isinstance(queue.error, GossipError):
                raise queue.error
            if queue.error is not None:
                raise GossipError(f"a message could not be sent: {queue.error}") from queue.error

    def drain(self, timeout_seconds: float) -> None:
        """Waits until all is handed to the transport, at most `timeout_seconds`; threads end."""
        deadline, me = time.monotonic() + timeout_seconds, threading.current_thread()
        with self._lock:
            for queue in self._queues.values():
                if queue.thread is not me:  # which a channel that is collected may be closed in
                    left = max(0.0, deadline - time.monotonic())
                    queue.changed.wait_for(lambda queue=queue: not queue.waiting, left)
                queue.closed = True
                queue.changed.notify_all()

    @property
    def empty(self) -> bool:
        """Whether all parts have left, but those for peers that are gone."""
        with self._lock:
            self._tickets = [(peer, t) for peer, t in self._tickets if not t.done]
            return all(self._gone(peer) for peer, _ in self._tickets)

    def _send(
        self, peer: int, header: bytes, payload: Tensor | None, ready: Callable[[], None] | None
    ) -> Ticket:
        if peer not in self._queues:
            self._queues[peer] = _Queue(
                self._lock, lambda header, payload: self._transmit(peer, header, payload)
            )
        return self._queues[peer].send(header, payload, ready)

    def _transmit(self, peer: int, header: bytes, payload: Tensor | None) -> Ticket:
        with self._lock:
            if self._gone(peer):
                return Sent()
            return self._transport.send(peer, header, payload)
