"""The door of a listening socket: who is let in, who is sent away, and how many were."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from gossipgrad.comm import _waiting
from gossipgrad.comm._tcp import Peer, close_connection, host_of
from gossipgrad.comm._waiting import Waiting, most_waiting

__all__ = ["Admission", "Door"]

logger = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
_TICK_SECONDS = 0.1
_END_SECONDS = 5.0
_MOST_TOLD = 16  # hosts, and what they did, for which something is logged
_BROKEN_KEPT = 1024
_IN, _NOT_IN, _COME_AGAIN = b"200", b"400", b"300"


class Admission(NamedTuple):
    """What a connection's credentials are worth.

    Attributes:
        name: Of the connection, None if it is not let in.
        again: The link whose word was shown once more, though it is used up.
    """

    name: str | None
    again: str | None = None


class Door:
    """Lets in to a listening socket who shows good credentials, in a thread of its own.

    ZeroMQ takes in no message before. One that comes and does not show any is sent away after a
    while, or as soon as too many wait; one that was refused, or says more than credentials take, at
    the next look, where the system tells what went over a connection (Linux).

    Args:
        context: Of the socket; nobody else answers its requests for authentication.
        socket: Not bound yet.
        admit: Says by mechanism and credentials whose connection it is.
        encrypt: Whether the mechanism is CURVE.
        expected: How many members may come at the same time.
        whose: In what is logged.

    Attributes:
        refused: Connections that were not let in.
        process: Where its thread lives.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        socket: "zmq.Socket[bytes]",
        admit: Callable[[bytes, Sequence[bytes]], Admission],
        *,
        encrypt: bool,
        expected: int,
        whose: str,
    ) -> None:
        self.refused = 0
        self.process = os.getpid()
        self._admit = admit
        self._socket = socket
        self._whose = whose
        self._waiting = Waiting(encrypt=encrypt, most=most_waiting(expected))
        self._accepted = self._succeeded = self._excused = 0
        self._spoke: deque[tuple[int, str]] = deque()  # descriptors, from the thread that reads
        self._speakers: dict[int, str] = {}  # links by descriptor
        self._broken: deque[str] = deque(maxlen=_BROKEN_KEPT)
        self._told: set[tuple[str, str]] = set()
        self._failed = self._closing = False
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * _waiting.HANDSHAKE_SECONDS))
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
        try:
            self._thread.start()
        except RuntimeError:  # there is no room for one more
            self._socket.disable_monitor()
            self._over()
            self._stop.close(linger=0)
            raise

    def opened(self, port: int) -> None:
        """The socket is bound to that port."""
        self._waiting.port = port

    def expect(self, host: str) -> None:
        """A member listens on that host: who comes from there gives way last."""
        self._waiting.friends.add(host)

    def spoke(self, descriptor: int, link: str) -> None:
        """A link's first message came over that connection; from any thread."""
        self._spoke.append((descriptor, link))

    def expel(self, descriptor: int, host: str) -> None:
        """Ends a connection from that host that was let in; from any thread."""
        if self._waiting.port is not None:
            close_connection(descriptor, self._waiting.port, host)

    def close(self) -> bool:
        """Answers nobody any more; before the socket is closed.

        Returns:
            Whether its thread is at its end, so that the context can be ended.
        """
        own = threading.current_thread() is self._thread  # collected there by chance
        if not self._closing:
            self._closing = True
            self._socket.disable_monitor()  # an I/O thread would wait for who reads its events
            if not own:
                self._stop.send(b"")
                # It may want to log something while who waits here holds the log.
                self._thread.join(_END_SECONDS)
            self._stop.close(linger=0)
        if own or not self._thread.is_alive():
            self._over()
            return True
        return False

    def join(self) -> None:
        """Returns when its thread is at its end; `close` comes first."""
        self._thread.join()

    def _over(self) -> None:
        for socket in (self._questions, self._events, self._stopped):
            socket.close(linger=0)

    def _attend(self) -> None:
        try:
            while not self._stopped.closed:
                try:
                    self._answer_all()
                    return
                except Exception as error:
                    if self._stopped.closed or isinstance(error, zmq.ContextTerminated):
                        return
                    # Without this thread no link would be made any more.
                    level = logging.DEBUG if self._failed else logging.ERROR
                    logger.log(level, "%s goes on behind an error", self._whose, exc_info=error)
                    self._failed = True
                    if self._stopped.poll(int(1000 * _TICK_SECONDS)):
                        return
        finally:
            if self._closing:  # else an I/O thread still tells of events
                self._over()

    def _answer_all(self) -> None:
        poller = zmq.Poller()
        for socket in (self._questions, self._events, self._stopped):
            poller.register(socket, zmq.POLLIN)
        looked_seconds = time.monotonic()
        waiting = self._waiting
        while not self._stopped.closed:
            tick = int(1000 * _TICK_SECONDS) if len(waiting) else None
            ready = dict(poller.poll(0 if len(waiting) > waiting.most else tick))
            if self._stopped in ready:
                return
            self._note_speakers()
            sent_away = list[Peer]()
            if self._questions in ready:
                sent_away += self._answer()
            now = time.monotonic()
            if len(waiting) and now - looked_seconds >= _TICK_SECONDS:
                looked_seconds = now
                sent_away += waiting.look(now)
            sent_away += self._make_room()
            # Behind those: whoever was found to be let in has made its event before that.
            sent_away += self._note_events()
            self._count(sent_away)

    def _note_speakers(self) -> None:
        while self._spoke:
            descriptor, link = self._spoke.popleft()
            self._waiting.remove(descriptor)
            self._speakers[descriptor] = link

    def _note_events(self) -> list[Peer]:
        """Takes in who came, was let in and went; who went without."""
        came, went = dict[int, float](), list[Peer]()
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._succeeded += 1
                continue
            # A descriptor that is used again has been closed.
            if descriptor in self._speakers:
                self._broken.append(self._speakers.pop(descriptor))
            came.pop(descriptor, None)
            peer = self._waiting.remove(descriptor)
            if peer is not None:
                went.append(peer)
            if kind == zmq.Event.ACCEPTED:
                self._accepted += 1
                came[descriptor] = time.monotonic()
        for descriptor, now in came.items():
            self._waiting.add(descriptor, now)
        return went

    def _make_room(self) -> list[Peer]:
        """Takes in who came and went, and sends some away if too many wait; who went without."""
        went = self._note_events()
        self._note_speakers()  # they are in, and do not give way
        return went + self._waiting.make_room()

    def _answer(self) -> list[Peer]:
        """Answers all who ask; who went, or was sent away, without."""
        went = list[Peer]()
        while True:
            try:
                frames = self._questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return went
            # Who asks has come before. If it must give way, then now: nothing but its first message
            # tells, where the system does not, that it was let in.
            went += self._make_room()
            route, _, version, request, _, address, _, mechanism, *shown = frames
            code, name = _COME_AGAIN, None
            try:
                name, again = self._admit(mechanism, shown)
                code = _NOT_IN if name is None else _IN
                if name is None:
                    self._refuse(host_of(address.decode()), again)
            finally:
                user = b"" if name is None else name.encode()
                reply = [route, b"", version, request, code, b"", user, b""]
                self._questions.send_multipart(reply)

    def _refuse(self, host: str, again: str | None) -> None:
        if again is not None and again in self._broken:
            # ZeroMQ comes again by itself where a link broke; that is over, and no stranger.
            self._broken.remove(again)
            self._excused += 1
            logger.debug("%s: a link from %s broke and is not taken up again", self._whose, host)
        else:
            self._warn(host, "which showed no good credentials", logging.WARNING)

    def _count(self, went: Sequence[Peer]) -> None:
        # One that was let in is waiting still until it was looked at.
        refused = self._accepted - self._succeeded - self._excused - len(self._waiting)
        if refused > self.refused:
            self.refused = refused
            for peer in went:
                known = peer.host in self._waiting.friends
                level = logging.INFO if known else logging.WARNING
                self._warn(peer.host, "which went, or was sent away, before it showed any", level)

    def _warn(self, host: str, why: str, level: int) -> None:
        if (host, why) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((host, why))
            logger.log(
                level,
                "%s let a connection from %s not in, %s; further ones from there are counted alone",
                self._whose,
                host,
                why,
            )
