"""The queue of messages to one peer."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gossipgrad.comm._transport import Sent, Ticket, Transport
from gossipgrad.errors import GossipError

__all__ = ["Outbox"]

_IDLE_SECONDS = 5.0  # a thread that was idle for so long ends


@dataclass(slots=True, eq=False)
class _Deferred:
    """A message that waits for its buffer or behind another message, and its ticket."""

    header: bytes
    payload: Tensor | None
    ready: Callable[[], None] | None
    ticket: Ticket = field(default_factory=Sent)
    sent: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.sent.is_set() and self.ticket.done

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        return self.sent.wait(timeout_seconds) and self.ticket.wait(
            max(0.0, deadline - time.monotonic())
        )


class Outbox:
    """Sends messages to one peer in order; a thread waits for unfilled buffers.

    A message is sent immediately unless another waits before it. A link that never waits has no
    thread, and a link that waits delays no other.

    Args:
        transport: Moves the bytes.
        peer: The receiver.
        lock: Held by the caller, and acquired by the thread when it sends.
    """

    def __init__(self, transport: Transport, peer: int, lock: threading.RLock) -> None:
        self._transport = transport
        self._peer = peer
        self._changed = threading.Condition(lock)
        self._waiting: deque[_Deferred] = deque()  # the thread works on the first
        self._tickets: deque[Ticket] = deque()  # of messages that are not sent yet, in order
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_drained = self._is_over = False

    @property
    def is_empty(self) -> bool:
        """Whether all messages were handed to the transport."""
        return self._is_over or all(ticket.done for ticket in self._tickets)

    def send(
        self,
        header: bytes,
        payload: Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Ticket:
        """Send immediately, or from a thread after `ready` has returned."""
        if self._is_over or (self._error is not None and not self._is_drained):
            return Sent()  # a message after a missing part would be misread
        ticket: Ticket
        if self._is_drained or (ready is None and not self._waiting):
            ticket = self._transport.send(self._peer, header, payload)
        else:
            ticket = deferred = _Deferred(header, payload, ready)
            self._waiting.append(deferred)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="gossipgrad-sender", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        while self._tickets and self._tickets[0].done:
            self._tickets.popleft()
        if not ticket.done:
            self._tickets.append(ticket)
        return ticket

    def check(self) -> None:
        """Raise the error of a message that could not be sent from the thread.

        Raises:
            GossipError: If there was one.
        """
        if isinstance(self._error, GossipError):
            raise self._error
        if self._error is not None:
            raise GossipError(f"a message could not be sent: {self._error}") from self._error

    def drain(self, timeout_seconds: float) -> None:
        """Wait until all messages are handed to the transport, with a timeout; end the thread."""
        if self._thread is not threading.current_thread():  # a channel may be collected in it
            self._changed.wait_for(lambda: not self._waiting, max(0.0, timeout_seconds))
        self._is_drained = True
        self._changed.notify_all()

    def end(self) -> None:
        """Drop all messages, now and later: the peer is gone."""
        self._is_over = True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_drained or self._waiting, _IDLE_SECONDS)
                if not self._waiting:
                    self._thread = None
                    return
                message = self._waiting[0]
            try:
                if message.ready is not None and self._error is None:
                    message.ready()
                with self._changed:
                    if not self._is_over and self._error is None:
                        message.ticket = self._transport.send(
                            self._peer, message.header, message.payload
                        )
            except BaseException as error:
                self._error = error
            with self._changed:
                message.sent.set()
                self._waiting.popleft()
                self._changed.notify_all()
