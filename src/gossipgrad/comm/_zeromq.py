"""Links over ZeroMQ: its I/O threads move bytes in C++ while Python computes."""

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._group import Group
from gossipgrad.comm._interface import Interface, interface_of
from gossipgrad.comm._secret import SECRET_FILE, Secret, meet_secret
from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket
from gossipgrad.comm._waiting import HANDSHAKE_SECONDS
from gossipgrad.comm._zeromq_link import WATCHED, Link
from gossipgrad.comm._zeromq_listener import Listener

__all__ = ["ZeroMQTransport"]

_KEEPALIVE_SECONDS = (10, 5)  # how long a link is idle before it is tried, and how often then
_KEEPALIVE_TRIES = 4
_RECONNECT_MILLISECONDS = 50


def _abandon(
    context: zmq.Context[zmq.Socket[bytes]], listener: Listener, links: dict[int, Link]
) -> None:
    """Closes what a transport that nobody closed has left."""
    if os.getpid() != listener.door.process:
        return  # a fork of the process: all of it is its parent's
    for link in links.values():
        link.close(linger_seconds=0.0)
    _end(context, listener)


def _end(context: zmq.Context[zmq.Socket[bytes]], listener: Listener) -> None:
    """Ends a context, whose other sockets are closed."""
    if listener.close():
        context.term()
        return

    def wait() -> None:
        listener.door.join()
        context.term()

    threading.Thread(target=wait, name="gossipgrad-door-end", daemon=True).start()


def _warn_of_what_is_open(interface: Interface) -> None:
    if interface.one_host:
        return
    told = (
        "encrypt=True encrypts links alone: torch's collectives, at the start and in every average "
        "or consensus, send whole models in the clear"
    )
    if not os.environ.get(SECRET_FILE):
        told += (
            "; and the secret of the run went over the rendezvous store, where whoever listens to "
            f"it can read it: name a file with a secret on every rank, {SECRET_FILE}"
        )
    warnings.warn(f"{told}. A network that encrypts everything is WireGuard", stacklevel=2)


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
        self._secret = meet_secret(group)
        credentials = Credentials(self._secret, group.rank, group.members, encrypt=encrypt)
        self._make(credentials, group.rank, group.world_size, max_payload_bytes)
        with self._ended_by_an_error():
            interface = interface_of(group, bind)
            if encrypt and group.rank == group.members[0]:
                _warn_of_what_is_open(interface)
            members = group.members
            endpoint = self._listener.bind(interface)
            told = group.all_gather_object(credentials.introduce(endpoint))
            proof = credentials.meet(dict(zip(members, told, strict=True)))
            told = group.all_gather_object(proof)
            credentials.check(dict(zip(members, told, strict=True)))
            for member in members:
                self._expect(member)

    @classmethod
    def joining(
        cls,
        secret: Secret,
        rank: int,
        world_size: int,
        *,
        occasion: str,
        introductions: Mapping[int, Sequence[Any]],
        bind: str = "127.0.0.1",
        max_payload_bytes: int = 1 << 32,
        encrypt: bool = False,
    ) -> "ZeroMQTransport":
        """The transport of a rank that comes later; local.

        Its own `introduction` lets the others know where it listens (`take_in`); they let it in
        before that.

        Args:
            secret: Of the run.
            rank: Its number, which nobody has had before.
            world_size: As on the others.
            occasion: As on the others.
            introductions: Of those that it may talk to.
            bind: Address or name of the interface to listen on.
            max_payload_bytes: As on the others.
            encrypt: As on the others.

        Raises:
            ValueError: The interface cannot be listened on, or ZeroMQ cannot encrypt here.
            AgreementError: An introduction is not proven for that occasion.
        """
        self = cls.__new__(cls)
        members = {*range(rank + 1), *introductions}  # who has joined just before is not known yet
        credentials = Credentials(secret, rank, sorted(members), encrypt=encrypt)
        self._secret = secret
        self._make(credentials, rank, world_size, max_payload_bytes)
        with self._ended_by_an_error():
            credentials.introduce(self._listener.bind(Interface(bind, one_host=True)))
            credentials.join(occasion)
            self._expect(rank)
            for other, introduction in introductions.items():
                self.take_in(other, introduction)
        return self

    def beside(self, occasion: str, *, max_payload_bytes: int) -> "ZeroMQTransport":
        """Another transport of this rank, for an occasion of its own; local.

        Args:
            occasion: Which one.
            max_payload_bytes: As in the constructor.

        Raises:
            ValueError: The interface cannot be listened on any more.
        """
        return ZeroMQTransport.joining(
            self._secret,
            self.rank,
            self.world_size,
            occasion=occasion,
            introductions={},
            bind=self.address,
            max_payload_bytes=max_payload_bytes,
            encrypt=self._credentials.encrypt,
        )

    @property
    def refused_connections(self) -> int:
        """How many connections were not let in so far."""
        return self._listener.door.refused

    @property
    def address(self) -> str:
        """The address that this rank listens on, without the port."""
        return self._credentials.introduction_of(self.rank).host

    @property
    def occasion(self) -> str:
        """What tells this meeting of ranks from all others; equal on all, and no secret."""
        return self._credentials.occasion

    @property
    def introductions(self) -> dict[int, list[Any]]:
        """Where the ranks listen that are known, and their proofs; values are those of JSON."""
        return dict(self._credentials.introductions)

    @property
    def introduction(self) -> list[Any]:
        """This rank's own."""
        return self._credentials.introductions[self.rank]

    def take_in(self, rank: int, introduction: Sequence[Any]) -> None:
        """Learns where a rank listens that has joined; local, and from any thread.

        Raises:
            AgreementError: It is not proven for this occasion, or that number is another rank's.
        """
        self._credentials.take_in(rank, list(introduction))
        self._expect(rank)

    def open(self, peer: int) -> None:
        """Connects to `peer` and watches the connection, if it is known where that listens."""
        with self._sending:
            if not self._closed and peer in self._endpoints:
                self._link(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Queues a message; `payload` is read by an I/O thread until the ticket is done."""
        with self._sending:
            if self._closed or peer not in self._endpoints:
                return Sent()
            link = self._link(peer)
            body = None if payload is None else payload.view(torch.uint8).numpy().data
            if body is not None and body.nbytes > self.max_payload_bytes:
                raise ValueError(
                    f"a message of {body.nbytes} bytes is above max_payload_bytes="
                    f"{self.max_payload_bytes}: use smaller buckets, or raise it on all ranks"
                )
            return link.send(header, body)

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come, and who was found gone."""
        if self._closed:
            return []
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        events: list[Arrival | Lost] = [*self._listener.refused()]
        if self._listener.socket in ready:
            events.extend(self._listener.receive())
        with self._sending:
            for peer, link in self._links.items():
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
        if os.getpid() != self._listener.door.process:
            return  # a fork of the process: the links are its parent's
        with self._sending:
            if self._closed:
                return
            self._closed = True
            self._abandoned.detach()
            for link in self._links.values():
                down = link.down_since is not None or link.failures > 0
                self._drop(link, linger_seconds=0.0 if down else linger_seconds)
            self._links.clear()
        _end(self._context, self._listener)

    def _make(
        self, credentials: Credentials, rank: int, world_size: int, max_payload_bytes: int
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.max_payload_bytes = max_payload_bytes
        self._credentials = credentials
        self._sending = threading.Lock()
        self._links: dict[int, Link] = {}
        self._endpoints: dict[int, str] = {}
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listener = Listener(
                self._context,
                credentials,
                max_payload_bytes=max_payload_bytes,
                expected=world_size,
                whose=f"rank {rank}",
            )
        except BaseException:
            self._context.term()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)
        # A context that is collected with open sockets waits for them for ever.
        self._abandoned = weakref.finalize(
            self, _abandon, self._context, self._listener, self._links
        )
        self._abandoned.atexit = False  # pyrefly: ignore[missing-attribute]

    @contextmanager
    def _ended_by_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _expect(self, rank: int) -> None:
        introduction = self._credentials.introduction_of(rank)
        self._endpoints[rank] = introduction.endpoint
        self._listener.expect(introduction)

    def _link(self, peer: int) -> Link:
        link = self._links.get(peer)
        if link is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)  # the channel's credits bound what is queued
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
            socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_SECONDS))
            idle, interval = _KEEPALIVE_SECONDS
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
            socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
            socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_TRIES)
            seals = self._credentials.dress(socket, peer)
            monitor = socket.get_monitor_socket(WATCHED)
            socket.connect(self._endpoints[peer])
            link = self._links[peer] = Link(socket, monitor, seals)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _drop(self, link: Link, linger_seconds: float) -> None:
        self._poller.unregister(link.monitor)
        link.close(linger_seconds)

    def _watch(self, link: Link) -> None:
        while True:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            link.note(event)
