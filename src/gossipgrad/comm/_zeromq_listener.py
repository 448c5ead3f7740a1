"""The end of all links to a rank over ZeroMQ: one socket, with a door before it."""

import logging

import torch
import zmq

from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._door import Door
from gossipgrad.comm._interface import Interface, check_bound
from gossipgrad.comm._introduction import Introduction
from gossipgrad.comm._links_in import BrokenLinkError
from gossipgrad.comm._seal import SEAL_BYTES
from gossipgrad.comm._tcp import host_of
from gossipgrad.comm._transport import Arrival, Lost
from gossipgrad.comm._wire import WireError

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

_HEADER_BYTES = (1 << 14) + SEAL_BYTES
_CURVE_BYTES = 64  # an encrypted message is 33 longer on the wire, where its size is checked
_QUEUED_MESSAGES = 4096
_TOLD_AT_ONCE = 256  # of those refused, so that a flood takes no time from a step
_NOT_OURS = Arrival(b"", None)  # for the channel to count


class Listener:
    """Takes in what members send, and nothing of others.

    Args:
        context: Of its sockets.
        credentials: Say who is a member, and open what they send.
        max_payload_bytes: A larger message is cut off by ZeroMQ before memory is taken.
        expected: How many members may come at the same time.
        whose: In what is logged.

    Attributes:
        socket: To be polled.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        credentials: Credentials,
        *,
        max_payload_bytes: int,
        expected: int,
        whose: str,
    ) -> None:
        self._credentials = credentials
        self._whose = whose
        self._counted = 0
        self.socket = context.socket(zmq.PULL)
        try:
            most_bytes = max(max_payload_bytes, _HEADER_BYTES)
            overhead_bytes = _CURVE_BYTES if credentials.encrypt else 0
            self.socket.setsockopt(zmq.MAXMSGSIZE, most_bytes + overhead_bytes)
            self.socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
            credentials.guard(self.socket)
            self.door = Door(
                context,
                self.socket,
                credentials.admit,
                encrypt=credentials.encrypt,
                expected=expected,
                whose=whose,
            )
        except BaseException:
            self.socket.close(linger=0)
            raise

    def bind(self, interface: Interface) -> str:
        """Listens on a free port; where that is.

        Raises:
            ValueError: The interface is none of this host, or the others could not reach it.
        """
        address = interface.address
        self.socket.setsockopt(zmq.IPV6, int(":" in address))
        host = f"[{address}]" if ":" in address else address
        try:
            self.socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on bind={address!r} ({error}): it must be an address or "
                "interface of this host"
            ) from error
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        where, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        check_bound(interface, where.strip("[]"))
        self.door.opened(int(port))
        return endpoint

    def expect(self, introduction: Introduction) -> None:
        """A member has introduced itself."""
        self.door.expect(host_of(introduction.host))

    def refused(self) -> list[Arrival]:
        """One arrival for each connection that was not let in since this was last asked."""
        told = min(self.door.refused - self._counted, _TOLD_AT_ONCE)
        self._counted += told
        return [_NOT_OURS] * told

    def receive(self) -> list[Arrival | Lost]:
        """What has come; whose link was tampered with is lost."""
        events: list[Arrival | Lost] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return events
            try:
                events.append(self._read(frames))
            except WireError as error:
                # No member says such a thing, and no accident makes it: see what sits on the way.
                events.append(_NOT_OURS)
                logger.debug("%s ends a connection: %s", self._whose, error)
                self.door.expel(int(frames[0].get(zmq.SRCFD)), _host(frames[0]))
                if isinstance(error, BrokenLinkError):
                    events.append(Lost(error.sender))

    def close(self) -> bool:
        """Lets nobody in any more; whether the context can be ended."""
        ended = self.door.close()
        self.socket.close(linger=0)
        return ended

    def _read(self, frames: "list[zmq.Frame]") -> Arrival:
        body = frames[1].buffer if len(frames) == 2 else b""
        payload = torch.frombuffer(body, dtype=torch.uint8) if len(body) else None
        head = frames[0]
        name, sealed = str(head.get("User-Id")), b"" if len(head) > _HEADER_BYTES else head.bytes
        opened = self._credentials.open(name, sealed if len(frames) <= 2 else b"", len(body))
        if opened.link is not None:
            self.door.spoke(int(head.get(zmq.SRCFD)), opened.link)
        return Arrival(opened.header, payload, opened.sender)


def _host(frame: "zmq.Frame") -> str:
    return host_of(str(frame.get("Peer-Address")))
