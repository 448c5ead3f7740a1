"""One end of a link over ZeroMQ: the sending socket and the state of its connection."""

import contextlib
import time
from dataclasses import dataclass

import zmq

from gossipgrad.comm._transport import Sent, Ticket

__all__ = ["WATCHED", "Link"]

UP = zmq.Event.HANDSHAKE_SUCCEEDED
DOWN = zmq.Event.DISCONNECTED
_FAILED = zmq.Event.CLOSED  # an attempt to connect failed
_BROKEN_OFF = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
# The other end refuses us: ZeroMQ does not retry, and drops queued messages.
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
WATCHED = UP | DOWN | _FAILED | _BROKEN_OFF | _REFUSED
_GONE_AFTER_FAILURES = 2  # every peer listens before it sends its address: refusal means gone
_GONE_AFTER_BROKEN_OFF = 30  # a busy peer may take long to accept us
_GONE_AFTER_SECONDS = 0.5  # messages that a peer sent before it left are still in flight
_COPY_BELOW_BYTES = 1 << 15  # below this a copy is cheaper than tracking the buffer


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A ticket over ZeroMQ's message tracker."""

    tracker: zmq.MessageTracker

    @property
    def done(self) -> bool:
        """Whether ZeroMQ has released the memory."""
        return self.tracker.done

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it is done, with a timeout; return whether it is."""
        with contextlib.suppress(zmq.NotDone):
            self.tracker.wait(timeout_seconds)
        return self.tracker.done


@dataclass(slots=True)
class Link:
    """A PUSH socket to a peer, and the state of its connection.

    Attributes:
        socket: Connected or connecting.
        monitor: Reports the events of its connection.
        was_up: Whether the peer has accepted it once.
        down_since: When it broke (monotonic), None while it has not.
        failures: Connection attempts without an answer, in a row.
        broken_off: Connections that the peer closed before it accepted, in a row.
    """

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    was_up: bool = False
    down_since: float | None = None
    failures: int = 0
    broken_off: int = 0

    @property
    def gone(self) -> bool:
        """Whether its peer is lost: it never answered, or its connection ended.

        A link that reconnects stays lost: messages in flight when it broke are missing.
        """
        if self.down_since is None:
            hung_up = self.broken_off >= _GONE_AFTER_BROKEN_OFF
            return hung_up or self.failures >= _GONE_AFTER_FAILURES
        return time.monotonic() - self.down_since > _GONE_AFTER_SECONDS

    def close(self, linger_seconds: float) -> None:
        """Send queued messages for at most `linger_seconds`, then close both sockets."""
        if self.down_since is not None or self.failures > 0:
            linger_seconds = 0.0  # nobody would receive them
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_seconds * 1000))

    def note(self, event: int) -> None:
        """Handle an event of the monitor."""
        if event & UP:
            self.was_up, self.failures, self.broken_off = True, 0, 0
        elif self.was_up:
            if self.down_since is None:
                self.down_since = time.monotonic()
                # Otherwise ZeroMQ would reconnect by itself, to whatever listens at the address by
                # then.
                self.socket.disable_monitor()
                self.socket.close(linger=0)
        elif event & _REFUSED:
            self.failures = _GONE_AFTER_FAILURES
        elif event & _BROKEN_OFF:
            self.broken_off += 1
        elif event & _FAILED:
            self.failures += 1

    def send(self, header: bytes, body: memoryview | None) -> Ticket:
        """Queue a message; only a large body is not copied."""
        if self.down_since is not None:
            return Sent()
        try:
            if body is None or body.nbytes < _COPY_BELOW_BYTES:
                self.socket.send_multipart([header, *([] if body is None else [body])], zmq.NOBLOCK)
                return Sent()
            self.socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:  # refused: the queue is gone
            self.failures = _GONE_AFTER_FAILURES
            return Sent()
        ticket = self.socket.send(body, zmq.NOBLOCK, copy=False, track=True)
        assert ticket is not None
        return _Tracked(ticket)
