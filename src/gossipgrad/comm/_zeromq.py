"""Links over ZeroMQ: its I/O threads move bytes in C++ while Python computes."""

import os
import threading
import warnings
import weakref

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._door import Door
from gossipgrad.comm._group import Group
from gossipgrad.comm._interface import bind_address
from gossipgrad.comm._seal import SEAL_BYTES
from gossipgrad.comm._secret import SECRET_FILE, meet_secret
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket
from gossipgrad.comm._wire import WireError
from gossipgrad.comm._zeromq_link import WATCHED, Link

__all__ = ["ZeroMQTransport"]

_KEEPALIVE_SECONDS = (10, 5)  # how long a link is idle before it is tried, and how often then
_KEEPALIVE_TRIES = 4
_RECONNECT_MILLISECONDS = 50
_HEADER_BYTES = (1 << 14) + SEAL_BYTES
_NOT_OURS = Arrival(b"", None)  # for the channel to count
_TOLD_AT_ONCE = 256  # of those refused, so that a flood takes no time from a step
_QUEUED_MESSAGES = 4096


def _abandon(
    context: zmq.Context[zmq.Socket[bytes]],
    pull: zmq.Socket[bytes],
    links: dict[int, Link],
    door: Door,
) -> None:
    """Closes what a transport that nobody closed has left."""
    if os.getpid() != door.process:
        return  # a fork of the process: all of it is its parent's
    door.close()
    for link in links.values():
        link.close(linger_seconds=0.0)
    pull.close(linger=0)
    context.term()


def _warn_of_told_secret(address: str) -> None:
    local = address.startswith("127.") or address in ("::1", "lo")
    if not local and not os.environ.get(SECRET_FILE):
        warnings.warn(
            "encrypt=True, but the secret of the run went over the rendezvous store, where whoever "
            f"listens to it can read it: name a file with a secret on every rank, {SECRET_FILE}",
            stacklevel=2,
        )


class ZeroMQTransport:
    """One PULL socket that all peers send to, and one PUSH socket a peer, made when first used.

    Payloads leave from the caller's memory and arrive in ZeroMQ's: nothing is copied in Python,
    and a rank busy elsewhere still drains its partners. A connection is let in when it shows that
    it knows the secret of the run, and not before does ZeroMQ take in a message: from a file on
    every rank, named by `GOSSIPGRAD_SECRET_FILE`, or else random bytes that the lowest rank puts
    into the group's store. What an unencrypted link carries can be read on its way, and payloads
    be changed by who sits there; headers are sealed. Connections that are refused, and headers
    with no genuine seal, are counted.

    Args:
        group: Used once, to meet the secret and to tell all ranks the addresses (a collective).
        max_payload_bytes: A larger message is cut off by ZeroMQ before memory is taken.
        bind: Address or name of the interface to listen on; None: what `GOSSIPGRAD_BIND` says. By
            default loopback if all ranks are on one host, else the interface towards
            `MASTER_ADDR`, or the one this host's name resolves to.
        encrypt: Encrypt and authenticate everything (CURVE), on all ranks or on none.

    Attributes:
        refused_connections: How many were not let in so far.

    Raises:
        ValueError: If the interface cannot be listened on, or not be reached from other hosts; if
            the file of the secret cannot be read, or ZeroMQ cannot encrypt here.
        AgreementError: If ranks have different secrets, or only some encrypt.
        GossipError: If a rank dies while the addresses are told.
    """

    reopens = True

    def __init__(
        self,
        group: Group,
        *,
        max_payload_bytes: int = 1 << 32,
        bind: str | None = None,
        encrypt: bool = False,
    ) -> None:
        self._credentials = Credentials(
            meet_secret(group), group.rank, group.members, encrypt=encrypt
        )
        self.rank = group.rank
        self.world_size = group.world_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sending = threading.Lock()
        self._links: dict[int, Link] = {}
        self._closed = False
        self._max_payload_bytes = max_payload_bytes
        self._counted = 0
        self._pull = self._context.socket(zmq.PULL)
        self._credentials.guard(self._pull)
        self._door = Door(
            self._context,
            self._pull,
            self._credentials.admit,
            encrypt=encrypt,
            whose=f"rank {group.rank}",
        )
        try:
            self._endpoints = self._listen(group, bind)
        except BaseException:
            self._door.close()
            self._pull.close(linger=0)
            self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        # A context that is collected with open sockets waits for them for ever.
        self._abandoned = weakref.finalize(
            self, _abandon, self._context, self._pull, self._links, self._door
        )
        self._abandoned.atexit = False  # pyrefly: ignore[missing-attribute]

    @property
    def refused_connections(self) -> int:
        """How many connections were not let in so far."""
        return self._door.refused

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
            link = self._link(peer)
            body = None if payload is None else payload.view(torch.uint8).numpy().data
            if body is not None and body.nbytes > self._max_payload_bytes:
                raise ValueError(
                    f"a message of {body.nbytes} bytes is above max_payload_bytes="
                    f"{self._max_payload_bytes}: use smaller buckets, or raise it on all ranks"
                )
            return link.send(header, body)

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come, and who was found gone."""
        if self._closed:
            return []
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        told = min(self._door.refused - self._counted, _TOLD_AT_ONCE)
        self._counted += told
        events: list[Arrival | Lost] = [_NOT_OURS] * told
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
            self._door.close()
            self._pull.close(linger=0)
        self._context.term()

    def _listen(self, group: Group, bind: str | None) -> dict[int, str]:
        self._pull.setsockopt(zmq.MAXMSGSIZE, max(self._max_payload_bytes, _HEADER_BYTES))
        self._pull.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        address = bind_address(group, bind)
        if self._credentials.encrypt and group.rank == group.members[0]:
            _warn_of_told_secret(address)
        self._pull.setsockopt(zmq.IPV6, int(":" in address))
        host = f"[{address}]" if ":" in address else address
        try:
            self._pull.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise ValueError(
                f"cannot listen on bind={address!r} ({error}): it must be an address or "
                "interface of this host"
            ) from error
        endpoint = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._door.opened(int(endpoint.rpartition(":")[2]))
        told = group.all_gather_object(self._credentials.introduce(endpoint))
        return self._credentials.meet(dict(zip(group.members, told, strict=True)))

    def _link(self, peer: int) -> Link:
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
            sealer = self._credentials.dress(socket, peer)
            monitor = socket.get_monitor_socket(WATCHED)
            socket.connect(self._endpoints[peer])
            link = self._links[peer] = Link(socket, monitor, sealer)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _drop(self, link: Link, linger_seconds: float) -> None:
        self._poller.unregister(link.monitor)
        link.close(linger_seconds)

    def _arrivals(self) -> list[Arrival | Lost]:
        arrivals: list[Arrival | Lost] = []
        while True:
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return arrivals
            arrivals.append(self._read(frames))

    def _read(self, frames: "list[zmq.Frame]") -> Arrival:
        if len(frames) > 2 or len(frames[0]) > _HEADER_BYTES:
            return _NOT_OURS
        payload = None
        if len(frames) == 2:
            body = frames[1].buffer
            payload = torch.frombuffer(body, dtype=torch.uint8) if len(body) else None
        try:
            name = str(frames[0].get("User-Id"))
            header = self._credentials.open(
                name, frames[0].bytes, 0 if payload is None else payload.numel()
            )
        except WireError:
            return _NOT_OURS
        return Arrival(header, payload)

    def _watch(self, link: Link) -> None:
        while True:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            link.note(event)
