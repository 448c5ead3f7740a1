"""Links over ZeroMQ: its I/O threads move bytes in C++ while Python computes."""

import threading
import time
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
_GONE_AFTER_SECONDS = 1.0
_RECONNECT_MILLISECONDS = 50
_COPY_BELOW_BYTES = 1 << 15  # below this a copy is cheaper than keeping track of the buffer
_HEADER_BYTES = 1 << 14
_QUEUED_MESSAGES = 4096


@dataclass(slots=True)
class _Link:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    down_since: float | None = None
    failures: int = 0

    @property
    def gone(self) -> bool:
        """Whether it has been down long enough to call its peer lost."""
        return self.failures >= _GONE_AFTER_FAILURES or (
            self.down_since is not None and time.monotonic() - self.down_since > _GONE_AFTER_SECONDS
        )


class ZeroMQTransport:
    """One PULL socket that all peers send to, and one PUSH socket a peer, made when first used.

    Payloads leave from the caller's memory and arrive in ZeroMQ's: nothing is copied in Python,
    and a rank busy elsewhere still drains its partners. Links are neither authenticated nor
    encrypted: use them on networks you trust.

    Args:
        group: Used once, to tell all ranks the addresses (a collective).
        max_payload_bytes: A larger message is cut off by ZeroMQ before memory is taken.
        bind: Address of the interface to listen on. By default loopback if all ranks are on one
            host, else the interface that this host's name resolves to.

    Raises:
        GossipError: If a rank dies while the addresses are told.
    """

    def __init__(
        self, group: Group, *, max_payload_bytes: int = 1 << 32, bind: str | None = None
    ) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sending = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._closed = False
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.MAXMSGSIZE, max(max_payload_bytes, _HEADER_BYTES))
        self._pull.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        self._pull.setsockopt(zmq.LINGER, 0)
        address = bind if bind is not None else bind_address(group)
        self._pull.setsockopt(zmq.IPV6, int(":" in address))
        host = f"[{address}]" if ":" in address else address
        self._pull.bind(f"tcp://{host}:*")
        endpoint = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._endpoints: list[str] = group.all_gather_object(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)

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
            body = memoryview(payload.view(torch.uint8).numpy())
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
        ready = dict(self._poller.poll(timeout_seconds * 1000))
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
            link = self._links.pop(peer, None)
            if link is not None:
                self._drop(link, linger_seconds=0.0)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Closes all links; sends what is queued for at most `linger_seconds`."""
        with self._sending:
            if self._closed:
                return
            self._closed = True
            for link in self._links.values():
                down = link.down_since is not None or link.failures > 0
                self._drop(link, linger_seconds=0.0 if down else linger_seconds)
            self._links.clear()
            self._pull.close()
        self._context.term()

    def _link(self, peer: int) -> _Link:
        link = self._links.get(peer)
        if link is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)  # the channel's credits bound what is queued
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
            monitor = socket.get_monitor_socket(_UP | _DOWN | _FAILED)
            socket.connect(self._endpoints[peer])
            link = self._links[peer] = _Link(socket, monitor)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _drop(self, link: _Link, linger_seconds: float) -> None:
        self._poller.unregister(link.monitor)
        link.socket.disable_monitor()
        link.monitor.close(linger=0)
        link.socket.close(linger=int(linger_seconds * 1000))

    def _arrivals(self) -> list[Arrival | Lost]:
        arrivals: list[Arrival | Lost] = []
        while True:
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return arrivals
            if len(frames) > 2 or len(frames[0]) > _HEADER_BYTES:
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
            if event & _UP:
                link.down_since, link.failures = None, 0
            elif event & _FAILED:
                link.failures += 1
            else:
                link.down_since = link.down_since or time.monotonic()
