"""The door of a listening socket: who is let in, who is sent away, and how many were."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from gossipgrad.comm._tcp import close_connection, traffic

__all__ = ["Door"]

logger = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
_HANDSHAKE_SECONDS = 15.0  # for one that knows the secret, on a machine that is very busy
_TICK_SECONDS = 0.1
_MOST_WAITING = 128  # connections that have not shown yet who they are: file handles
_MOST_HEARD_BYTES = 4096  # of such a one: a whole handshake has less than 1024
# What a stranger gets of ours: a greeting of 64; of CURVE, 170 if it repeats the beginning of
# another's handshake; then a refusal of 13 at most, where a member gets 38 at least.
_GREETING_BYTES = {False: 64, True: 64 + 170}
_REFUSAL_BYTES = 24


class Door:
    """Lets in to a listening socket who shows good credentials, in a thread of its own.

    ZeroMQ takes in no message before. One that comes and does not show any is sent away after a
    while, as is the one that came first where too many wait, and one that says more than
    credentials take; the latter two where the system tells what went over a connection (Linux).

    Args:
        context: Of the socket; nobody else answers its requests for authentication.
        socket: Not bound yet.
        admit: Says by mechanism and credentials whose connection it is, None to refuse it.
        encrypt: Whether the mechanism is CURVE.
        whose: In what is logged.

    Attributes:
        refused: Connections that were not let in.
        process: Where its thread lives.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        socket: "zmq.Socket[bytes]",
        admit: Callable[[bytes, Sequence[bytes]], str | None],
        *,
        encrypt: bool,
        whose: str,
    ) -> None:
        self.refused = 0
        self.process = os.getpid()
        self._admit = admit
        self._socket = socket
        self._whose = whose
        self._heard_bytes = _GREETING_BYTES[encrypt] + _REFUSAL_BYTES
        self._waiting: dict[int, float] = {}  # by file descriptor, since when
        self._accepted = self._succeeded = 0
        self._port: int | None = None
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * _HANDSHAKE_SECONDS))
        self._questions = context.socket(zmq.ROUTER)
        self._questions.bind(_ZAP)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # an I/O thread would wait for us to read
        name = f"inproc://door-{id(self)}"
        socket.monitor(f"{name}-events", _EVENTS)
        self._events.connect(f"{name}-events")
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind(name)
        self._stopped.connect(name)
        self._thread = threading.Thread(target=self._attend, name="gossipgrad-door", daemon=True)
        self._thread.start()

    def opened(self, port: int) -> None:
        """The socket is bound to that port."""
        self._port = port

    def close(self) -> None:
        """Answers nobody any more; before the socket is closed."""
        if self._stop.closed:
            return
        self._socket.disable_monitor()  # an I/O thread would wait for who reads its events
        if threading.current_thread() is self._thread:  # collected there by chance
            self._over()
        else:
            self._stop.send(b"")
            self._thread.join()
        self._stop.close(linger=0)

    def _over(self) -> None:
        for socket in (self._questions, self._events, self._stopped):
            socket.close(linger=0)

    def _attend(self) -> None:
        try:
            self._answer_all()
        except zmq.ZMQError:
            if not self._stopped.closed:
                raise

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        for socket in (self._questions, self._events, self._stopped):
            poller.register(socket, zmq.POLLIN)
        checked_seconds = time.monotonic()
        while not self._stopped.closed:
            ready = dict(poller.poll(int(1000 * _TICK_SECONDS) if self._waiting else None))
            if self._stopped in ready:
                self._over()
                return
            if self._events in ready:
                self._note_events()
            if self._questions in ready:
                self._answer()
            now = time.monotonic()
            if self._waiting and now - checked_seconds >= _TICK_SECONDS:
                checked_seconds = now
                self._check(now)
            self._count()

    def _note_events(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._succeeded += 1
            elif event["event"] == zmq.Event.DISCONNECTED:
                self._waiting.pop(event["value"], None)
            else:
                self._accepted += 1
                # A descriptor that is used again has been closed.
                self._waiting.pop(event["value"], None)
                self._waiting[event["value"]] = time.monotonic()
                self._make_room()

    def _answer(self) -> None:
        while True:
            try:
                frames = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route, _, version, request, _, address, _, mechanism, *shown = frames
            name = self._admit(mechanism, shown)
            if name is None:
                logger.debug("%s refused a connection from %s", self._whose, address.decode())
            code, text = (b"400", b"") if name is None else (b"200", b"")
            user = b"" if name is None else name.encode()
            reply = [route, b"", version, request, code, text, user, b""]
            self._questions.send_multipart(reply)

    def _make_room(self) -> None:
        """Sends the one away that has waited longest, if too many wait."""
        while len(self._waiting) > _MOST_WAITING:
            descriptor = next(iter(self._waiting))
            went = None if self._port is None else traffic(descriptor, self._port)
            if went is not None and went.taken_bytes <= self._heard_bytes:
                close_connection(descriptor, self._port)
            del self._waiting[descriptor]

    def _check(self, now_seconds: float) -> None:
        """Strikes off who was let in, and sends away who says too much."""
        for descriptor, since_seconds in list(self._waiting.items()):
            went = None if self._port is None else traffic(descriptor, self._port)
            # Without a word ZeroMQ sends one away by itself: who is still there was let in.
            let_in = now_seconds - since_seconds > _HANDSHAKE_SECONDS + 1
            if went is not None and went.taken_bytes > self._heard_bytes:
                let_in = True
            if let_in:
                del self._waiting[descriptor]
            elif went is not None and went.heard_bytes > _MOST_HEARD_BYTES:
                close_connection(descriptor, self._port)

    def _count(self) -> None:
        # One that was let in is waiting still until it was looked at.
        refused = self._accepted - self._succeeded - len(self._waiting)
        if refused > self.refused:
            if self.refused == 0:
                logger.warning(
                    "%s refused a connection that did not know the secret of the run; further ones "
                    "are counted alone",
                    self._whose,
                )
            self.refused = refused
