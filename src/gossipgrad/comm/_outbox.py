"""What a channel sends: parts and words, in order on each link, and whether they have left."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from gossipgrad.comm._exchange import Exchange
from gossipgrad.comm._sender import DeferredSender
from gossipgrad.comm._transport import Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, Kind

__all__ = ["Outbox"]

_OF_NO_ORDER = (Kind.ASK, Kind.GO)


class Outbox:
    """Sends to those who are not gone; each message says what its sender knew of the receiver.

    Args:
        transport: Moves the bytes.
        lock: The channel's: held by whoever calls, and taken by the thread that sends later.
        gone: Whether a peer is gone.
        known: The number of a peer's last settlement that is known here.

    Attributes:
        linked: Peers to whom something was sent, or from whom something is awaited.
        bytes_sent: Of payloads.
    """

    def __init__(
        self,
        transport: Transport,
        lock: AbstractContextManager[object],
        *,
        gone: Callable[[int], bool],
        known: Callable[[int], int],
    ) -> None:
        self.linked: set[int] = set()
        self.bytes_sent = 0
        self._transport = transport
        self._lock = lock
        self._gone = gone
        self._known = known
        self._sender = DeferredSender(self._transmit)
        self._tickets: list[tuple[int, Ticket]] = []

    def part(
        self,
        exchange: Exchange,
        header: Header,
        payload: Tensor,
        ready: Callable[[], None] | None,
    ) -> None:
        """Sends this rank's part of an exchange, which gets the ticket."""
        peer = exchange.send_to
        if peer is None or self._gone(peer):
            exchange.ticket = Sent()
            return
        header = replace(header, known=self._known(peer))
        exchange.ticket = self._sender.send(peer, header.pack(), payload, ready)
        self.linked.add(peer)
        self._tickets = [(to, t) for to, t in self._tickets if not t.done]
        self._tickets.append((peer, exchange.ticket))
        self.bytes_sent += header.size_bytes

    def tell(self, header: Header, peers: Iterable[int]) -> None:
        """Sends a message without payload; one of no order past those that wait for buffers."""
        for peer in peers:
            if not self._gone(peer):
                told = replace(header, known=self._known(peer)).pack()
                if header.kind in _OF_NO_ORDER:
                    self._transmit(peer, told, None)
                else:
                    self._sender.send(peer, told, None, None)
                self.linked.add(peer)

    def check(self) -> None:
        """Raises what kept a message that waited for its buffer from being sent."""
        self._sender.check()

    def drain(self, timeout_seconds: float) -> None:
        """Waits until all is handed to the transport, at most `timeout_seconds`."""
        self._sender.drain(timeout_seconds)

    @property
    def empty(self) -> bool:
        """Whether all parts have left, but those for peers that are gone."""
        with self._lock:
            self._tickets = [(peer, t) for peer, t in self._tickets if not t.done]
            return all(self._gone(peer) for peer, _ in self._tickets)

    def _transmit(self, peer: int, header: bytes, payload: Tensor | None) -> Ticket:
        with self._lock:
            if self._gone(peer):
                return Sent()
            return self._transport.send(peer, header, payload)
