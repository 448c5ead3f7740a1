"""Links over ZeroMQ: its I/O threads move bytes in C++ while Python computes."""

import threading
import time
import weakref
from dataclasses import dataclass

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from gossipgrad.comm._group import Group
from gossipgrad.comm._interface import bind_address
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket

__all__ = ["ZeroMQTransport"]

_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN = zmq.Event.DISCONNECTED
_FAILED = zmq.Event.CLOSED  # an attempt to connect failed
_GONE_AFTER_FAILURES = 2  # every peer listens before its address is told: refusal means gone
_GONE_AFTER_SECONDS = 0.5  # what a peer sent before it left is still under way
_KEEPALIVE_SECONDS = (10, 5)  # how long a link is idle before it is tried, and how often then
_KEEPALIVE_TRIES = 4
_RECONNECT_MILLISECONDS = 50
_COPY_BELOW_BYTES = 1 << 15  # below this a copy is cheaper than keeping track of the buffer
_HEADER_BYTES = 1 << 14
_QUEUED_MESSAGES = 4096


@dataclass(slots=True)
class _Link:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    was_up: bool = False
    down_since: float | None = None
    failures: int = 0

    @property
    def gone(self) -> bool:
        """Whether its peer is lost: never there, or there once and then not.

        A link that comes up again stays lost: what was on its way when it broke is missing.
        """
        if self.down_since is None:
            return self.failures >= _GONE_AFTER_FAILURES
        return time.monotonic() - self.down_since > _GONE_AFTER_SECONDS

    def close(self, linger_seconds: float) -> None:
        """Closes both sockets; sends what is queued for at most `linger_seconds`."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_seconds * 1000))

    def note(self, event: int) -> None:
        """Takes in what the monitor saw."""
        if event & _UP:
            self.was_up, self.failures = True, 0
        elif self.was_up:
            self.down_since = self.down_since or time.monotonic()
        elif event & _FAILED:
            self.failures += 1


def _abandon(
    context: zmq.Context[zmq.Socket[bytes]], pull: zmq.Socket[bytes], links: dict[int, _Link]
) -> None:
    """Closes what a transport that nobody closed has left."""
    for link in links.values():
        link.close(linger_seconds=0.0)
    pull.close(linger=0)
    context.term()


class ZeroMQTransport:
    """One PULL socket that all peers send to, and one PUSH socket a peer, made when first used.

    Payloads leave from the caller's memory and arrive in ZeroMQ's: nothing is copied in Python,
    and a rank busy elsewhere still drains its partners. Links are neither authenticated nor
    encrypted: use them on networks you trust.

    Args:
        group: Used once, to tell all ranks the addresses (a collective).
        max_payload_bytes: A larger message is cut off by ZeroMQ before memory is taken.
        bind: Address of the interface to listen on. By default loopback if all ranks are on one
            host, else the interface towards `MASTER_ADDR`, or the one this host's name resolves
            to.

    Raises:
        ValueError: If the interface cannot be listened on, or not be reached from other hosts.
        GossipError: If a rank dies while the addresses are told.
    """

    reopens = True

    def __init__(
        self, group: Group, *, max_payload_bytes: int = 1 << 32, bind: str | None = None
    ) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sending = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False
        self._max_payload_bytes = max_payload_bytes
        self._pull = self._context.socket(zmq.PULL)
        try:
            self._endpoints = self._listen(group, bind)
        except BaseException:
            self._pull.close(linger=0)
            self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        # A context that is collected with open sockets waits for them for ever.
        self._abandoned = weakref.finalize(self, _abandon, self._context, self._pull, self._links)
        self._abandoned.atexit = False  # pyrefly: ignore[missing-attribute]

    def open(self, peer: int) -> None:
        """Connects to `peer` and watches the connection."""
        with self._sending:
            if not self._closed:
                self._link(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Queues a message; `payload` is read by an I/O thread until the ticket is done."""
        with self._sending:
            if self._closed:
                return Sent()
            socket = self._link(peer).socket
            if payload is None:
                socket.send_multipart([header], zmq.NOBLOCK)
                return Sent()
            body = payload.view(torch.uint8).numpy().data
            if body.nbytes > self._max_payload_bytes:
                raise ValueError(
                    f"a message of {body.nbytes} bytes is above max_payload_bytes="
                    f"{self._max_payload_bytes}: use smaller buckets, or raise it on all ranks"
                )
            if body.nbytes < _COPY_BELOW_BYTES:
                socket.send_multipart([header, body], zmq.NOBLOCK)
                return Sent()
            socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            ticket = socket.send(body, zmq.NOBLOCK, copy=False, track=True)
            assert ticket is not None
            return ticket

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come, and who was found gone."""
        if self._closed:
            return []
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        events: list[Arrival | Lost] = []
        if self._pull in ready:
            events.extend(self._arrivals())
        with self._sending:
            links = list(self._links.items())
        for peer, link in links:
            if link.monitor in ready:
                self._watch(link)
            if link.gone:
                events.append(Lost(peer))
        return events

    def forget(self, peer: int) -> None:
        """Closes the link to `peer` and drops what was queued for it."""
        with self._sending:
            if self._closed:
                return
            link = self._links.pop(peer, None)
            if link is not None:
                self._drop(link, linger_seconds=0.0)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes all links; sends what is queued for at most `linger_seconds`."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            self._abandoned.detach()
            for link in self._links.values():
                down = link.down_since is not None or link.failures > 0
                self._drop(link, linger_seconds=0.0 if down else linger_seconds)
            self._links.clear()
            self._pull.close(linger=0)
        self._context.term()

    def _listen(self, group: Group, bind: str | None) -> dict[int, str]:
        self._pull.setsockopt(zmq.MAXMSGSIZE, max(self._max_payload_bytes, _HEADER_BYTES))
        self._pull.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        address = bind_address(group, bind)
        self._pull.setsockopt(zmq.IPV6, int(":" in address))
        host = f"[{address}]" if ":" in address else address
        try:
            self._pull.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on bind={address!r} ({error}): it must be an address of this host"
            ) from error
        told = group.all_gather_object(self._pull.getsockopt_string(zmq.LAST_ENDPOINT))
        return dict(zip(group.members, told, strict=True))

    def _link(self, peer: int) -> _Link:
        link = self._links.get(peer)
        if link is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)  # the channel's credits bound what is queued
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
            idle, interval = _KEEPALIVE_SECONDS
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
            socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
            socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_TRIES)
            monitor = socket.get_monitor_socket(_UP | _DOWN | _FAILED)
            socket.connect(self._endpoints[peer])
            link = self._links[peer] = _Link(socket, monitor)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _drop(self, link: _Link, linger_seconds: float) -> None:
        self._poller.unregister(link.monitor)
        link.close(linger_seconds)

    def _arrivals(self) -> list[Arrival | Lost]:
        arrivals: list[Arrival | Lost] = []
        while True:
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return arrivals
            if len(frames) > 2 or len(frames[0]) > _HEADER_BYTES:
                arrivals.append(Arrival(b"", None))  # not ours; for the channel to count
                continue
            payload = None
            if len(frames) == 2:
                body = frames[1].buffer
                payload = torch.frombuffer(body, dtype=torch.uint8) if len(body) else None
            arrivals.append(Arrival(frames[0].bytes, payload))

    def _watch(self, link: _Link) -> None:
        while True:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            link.note(event)
