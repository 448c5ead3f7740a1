"""Links over ZeroMQ: its I/O threads move bytes in C++ while Python computes."""

import atexit
import contextlib
import os
import re
import resource
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.auth import Authenticator
from zmq.utils.garbage import gc
from zmq.utils.monitor import parse_monitor_message

from gossipgrad._messages import warn
from gossipgrad.comm._access import Access, check_encrypt, check_same, meet_access
from gossipgrad.comm._asked_store import Deadline
from gossipgrad.comm._group import Group
from gossipgrad.comm._interface import BIND, check_bound, interface_of
from gossipgrad.comm._transport import Lost, Received, Sent, Ticket, Transport
from gossipgrad.comm._zeromq_link import WATCHED, Link
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["ZeroMQTransport", "resolve_transport"]

_HEADER_BYTES = 1 << 14
_CURVE_BYTES = 64  # encryption adds 33 bytes to a message, before its size is checked
_QUEUED_MESSAGES = 4096
_NOT_OURS = Received(b"", None)  # for the channel to count
_SOCKETS, _FILES = 4, 8  # of a link, and more than needed: partners rotate through all ranks
_OTHER_FILES = 256  # of the rest of the process
_KEEPALIVE_SECONDS = (10, 5)  # the idle time before a link is probed, and the interval after that
_KEEPALIVE_TRIES = 4
_RECONNECT_MILLISECONDS = 50
_PING = b"gossipgrad ping"
_PING_SECONDS, _PING_POLL_SECONDS = 10.0, 0.05
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Za-z:.%]+\]|[^:/\s]+):\d{1,5}")

_open: "weakref.WeakSet[ZeroMQTransport]" = weakref.WeakSet()


@dataclass(eq=False, slots=True)
class _Sockets:
    """The sockets of a transport, closed even if the transport is not."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    listener: "zmq.Socket[bytes]"
    authenticator: Authenticator | None
    links: dict[int, Link] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for at most `linger_seconds`, then end the context."""
        if os.getpid() != self.process:
            return  # a forked child: the sockets belong to its parent
        for link in self.links.values():
            link.close(linger_seconds)
        self.links.clear()
        self.listener.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.term()


class ZeroMQTransport:
    """One PULL socket that all peers send to, and one PUSH socket per peer, created on first use.

    Payloads leave from the caller's memory and arrive in ZeroMQ's: nothing is copied in Python,
    and a rank busy elsewhere still drains its partners. Links are plain, for a trusted network, or
    encrypted and authenticated by CURVE with a secret from a file on every rank, which
    `GOSSIPGRAD_SECRET_FILE` names.

    Args:
        group: Used once, to compare secrets and exchange addresses (a collective).
        max_payload_bytes: ZeroMQ refuses a larger message before it allocates memory.
        bind: Address or name of the interface to listen on; None: the value of `GOSSIPGRAD_BIND`.
            By default loopback if all ranks are on one host, else the interface towards
            `MASTER_ADDR`, or the one this host's name resolves to.
        encrypt: Encrypt and authenticate everything, on all ranks or on none; None: if
            `GOSSIPGRAD_SECRET_FILE` is set.

    Attributes:
        introductions: The introductions of all known ranks, including this one.

    Raises:
        ValueError: If the interface cannot be listened on, or cannot be reached from other hosts;
            if there is no secret to encrypt with, or ZeroMQ cannot encrypt here.
        AgreementError: If ranks have different secrets, or only some encrypt.
        GossipError: If a rank dies while addresses are exchanged, or has no secret; or if a
            message from each rank to the next does not arrive.
    """

    reopens = True

    def __init__(
        self,
        group: Group,
        *,
        max_payload_bytes: int = 1 << 32,
        bind: str | None = None,
        encrypt: bool | None = None,
    ) -> None:
        access = meet_access(group, encrypt)
        address, one_host = interface_of(group, bind)
        if access.fingerprint and not one_host and group.rank == group.members[0]:
            warn(
                "links are encrypted, and torch's collectives are not: at the start, and in every "
                "average or consensus, they send whole models in the clear. A network that "
                "encrypts everything is WireGuard"
            )
        with self._listen(
            access, group.rank, group.world_size, max_payload_bytes, address, one_host=one_host
        ):
            introductions = group.all_gather_object(self.introduction)
            for member, introduction in zip(group.members, introductions, strict=True):
                self.add_peer(member, introduction)
            self._prove_links(group)

    @classmethod
    def joining(
        cls,
        rank: int,
        world_size: int,
        *,
        introductions: Mapping[int, Sequence[Any]],
        bind: str = "127.0.0.1",
        max_payload_bytes: int = 1 << 32,
        encrypt: bool | None = None,
    ) -> "ZeroMQTransport":
        """Create the transport of a joiner; local.

        The others connect to it by its `introduction` (`add_peer`).

        Args:
            rank: Its number, which no rank had before.
            world_size: As on the others.
            introductions: The introductions of the ranks that it may send to.
            bind: Address or name of the interface to listen on.
            max_payload_bytes: As on the others.
            encrypt: As on the others.

        Raises:
            ValueError: The interface cannot be listened on, or there is no secret to encrypt with.
            AgreementError: The others have another secret, or only one of both encrypts.
        """
        self = cls.__new__(cls)
        with self._listen(Access.resolve(encrypt), rank, world_size, max_payload_bytes, bind):
            for other, introduction in introductions.items():
                self.add_peer(other, introduction)
        return self

    def beside(self, *, max_payload_bytes: int) -> "ZeroMQTransport":
        """Return another transport of this rank, with its own links; local.

        Args:
            max_payload_bytes: As in the constructor.

        Raises:
            ValueError: The interface can no longer be listened on.
        """
        other, here = ZeroMQTransport.__new__(ZeroMQTransport), self.address
        with other._listen(self._access, self.rank, self.world_size, max_payload_bytes, here):
            return other

    @property
    def is_encrypted(self) -> bool:
        """Whether links are encrypted."""
        return self._access.fingerprint is not None

    @property
    def address(self) -> str:
        """The address that this rank listens on, without the port."""
        return _address_of(self.introduction[0])

    @property
    def introduction(self) -> list[Any]:
        """This rank's address and the fingerprint of its secret; values are those of JSON."""
        return self.introductions[self.rank]

    def add_peer(self, rank: int, introduction: Sequence[Any]) -> None:
        """Add a rank by its introduction; local, from any thread.

        Raises:
            AgreementError: It has another secret, only one of both encrypts, or another rank has
                that number.
        """
        match [*introduction]:
            case [str(endpoint), None | str() as fingerprint] if _ENDPOINT.fullmatch(endpoint):
                check_same(rank, fingerprint, self._access.fingerprint)
            case _:
                raise AgreementError(
                    f"rank {rank} introduces itself with {str(introduction)[:200]!r}: install the "
                    "same version of gossipgrad on every rank"
                )
        known = self.introductions.setdefault(rank, [endpoint, fingerprint])
        if known[0] != endpoint:
            raise AgreementError(f"rank {rank} is known already, and listens elsewhere")

    def open(self, peer: int) -> None:
        """Connect to `peer` and watch the connection, if its address is known."""
        with self._sending:
            if not self._closed and peer in self.introductions:
                self._link(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Queue a message; an I/O thread reads `payload` until the ticket is done."""
        with self._sending:
            if self._closed or peer not in self.introductions:
                return Sent()
            link = self._link(peer)
            body = None if payload is None else payload.view(torch.uint8).numpy().data
            if body is not None and body.nbytes > self.max_payload_bytes:
                raise ValueError(
                    f"a message of {body.nbytes} bytes is above max_payload_bytes="
                    f"{self.max_payload_bytes}: use smaller buckets, or raise it on all ranks"
                )
            return link.send(header, body)

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return received messages, and ranks that were lost."""
        if self._closed:
            return []
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        is_listener_ready = self._sockets.listener in ready
        events: list[Received | Lost] = [*self._arrivals()] if is_listener_ready else []
        with self._sending:
            for peer, link in self._links.items():
                if link.monitor in ready:
                    self._watch(link)
                if link.gone:
                    events.append(Lost(peer))
        return events

    def forget(self, peer: int) -> None:
        """Close the link to `peer` and drop its queued messages."""
        with self._sending:
            if not self._closed and (link := self._links.pop(peer, None)) is not None:
                self._poller.unregister(link.monitor)
                link.close(linger_seconds=0.0)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for at most `linger_seconds`, then close all links."""
        with self._sending:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._abandoned.detach()
            self._sockets.close(linger_seconds)

    def silence(self) -> None:
        """Stop sending and receiving, and leave the sockets open until the process exits."""
        with self._sending:
            self._closed = True
            self._abandoned.detach()
        if self._sockets.authenticator is not None and os.getpid() == self._sockets.process:
            self._sockets.authenticator.stop()

    def _prove_links(self, group: Group) -> None:
        """Send a message to the next rank, and await that of the one before; a collective.

        Nothing else is on the links before all ranks have done so.

        Raises:
            GossipError: On every rank, if a message did not arrive in time.
        """
        if (size := len(group.members)) == 1:
            return
        index = group.members.index(group.rank)
        after, before = group.members[(index + 1) % size], group.members[index - 1]
        self.send(after, b"%s %d" % (_PING, group.rank))
        expected, deadline, has_arrived = b"%s %d" % (_PING, before), Deadline(_PING_SECONDS), False
        while not has_arrived and not deadline.is_over():
            events = self.receive(_PING_POLL_SECONDS)
            if any(isinstance(event, Lost) for event in events):
                break  # the others learn of it below
            has_arrived = any(
                isinstance(each, Received) and each.header == expected for each in events
            )
        problems = [
            f"rank {before} at {_address_of(self.introductions[before][0])} cannot reach rank "
            f"{rank} at {self.introductions[rank][0].removeprefix('tcp://')}"
            for rank, before, arrived in group.all_gather_object([group.rank, before, has_arrived])
            if not arrived
        ]
        if problems:
            raise GossipError(
                f"links do not work: {'; '.join(problems)}. Name the interface that the others "
                f"reach on each host, {BIND}=10.0.0.7 or {BIND}=eth1 in the environment, and let "
                "firewalls pass TCP between the ranks, to any port"
            )

    @contextmanager
    def _listen(
        self,
        access: Access,
        rank: int,
        world_size: int,
        max_payload_bytes: int,
        address: str,
        *,
        one_host: bool = True,
    ) -> Iterator[None]:
        """Listen; an error inside closes everything again."""
        self.rank, self.world_size = rank, world_size
        self.max_payload_bytes = max_payload_bytes
        self.introductions: dict[int, list[Any]] = {}
        self._access = access
        self._sending = threading.Lock()
        self._closed = False
        _make_room(world_size)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, max(1023, _SOCKETS * world_size))
        listener = context.socket(zmq.PULL)
        self._sockets = _Sockets(context, listener, access.let_in(listener))
        self._links = self._sockets.links
        self._poller = zmq.Poller()
        self._poller.register(listener, zmq.POLLIN)
        # A context that is collected with open sockets waits for them forever.
        self._abandoned = weakref.finalize(self, self._sockets.close)
        self._abandoned.atexit = False  # pyrefly: ignore[missing-attribute]
        _open.add(self)
        try:
            most_bytes = max(max_payload_bytes, _HEADER_BYTES)
            most_bytes += _CURVE_BYTES if self.is_encrypted else 0
            listener.setsockopt(zmq.MAXMSGSIZE, most_bytes)
            listener.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
            endpoint = _bind(listener, address, one_host=one_host)
            self.introductions[rank] = [endpoint, access.fingerprint]
            yield
        except BaseException:
            self.close()
            raise

    def _arrivals(self) -> Iterator[Received]:
        for _ in range(_QUEUED_MESSAGES):  # not more: a flood must not hold up a step
            try:
                head, *rest = self._sockets.listener.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(rest) > 1 or len(head) > _HEADER_BYTES:
                yield _NOT_OURS
                continue
            body = rest[0].buffer if rest else b""
            yield Received(
                head.bytes, torch.frombuffer(body, dtype=torch.uint8) if len(body) else None
            )

    def _link(self, peer: int) -> Link:
        link = self._links.get(peer)
        if link is None:
            socket = self._sockets.context.socket(zmq.PUSH)
            idle_seconds, interval_seconds = _KEEPALIVE_SECONDS
            for option, value in (
                (zmq.SNDHWM, 0),  # the channel's credits bound what is queued
                (zmq.LINGER, 0),
                (zmq.IPV6, 1),
                (zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS),
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.TCP_KEEPALIVE_IDLE, idle_seconds),
                (zmq.TCP_KEEPALIVE_INTVL, interval_seconds),
                (zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_TRIES),
            ):
                socket.setsockopt(option, value)
            self._access.identify(socket)
            monitor = socket.get_monitor_socket(WATCHED)
            socket.connect(self.introductions[peer][0])
            link = self._links[peer] = Link(socket, monitor)
            self._poller.register(monitor, zmq.POLLIN)
        return link

    def _watch(self, link: Link) -> None:
        while True:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            link.note(event)


def resolve_transport(transport: Any, *, encrypt: Any = None) -> Callable[[Group, int], Transport]:
    """Return a function that makes a transport from a group and the largest payload in bytes.

    Args:
        transport: `"zeromq"`, or a function from a group to a transport with its own limit.
        encrypt: Whether to encrypt links, for `"zeromq"` only; None: if there is a secret.

    Raises:
        ValueError: There is no such transport, or it cannot encrypt.
    """
    if transport == "gloo":
        raise ValueError("transport='gloo': Gloo links are gone: use transport='zeromq'")
    if transport != "zeromq" and not callable(transport):
        raise ValueError(
            "transport must be 'zeromq' or a function from a group to a transport, "
            f"got {transport!r}"
        )
    check_encrypt(encrypt)
    if transport == "zeromq":
        return lambda group, largest_bytes: ZeroMQTransport(
            group, max_payload_bytes=largest_bytes, encrypt=encrypt
        )
    if encrypt:
        raise ValueError(
            "encrypt=True is for transport='zeromq'; in a function of your own write "
            "lambda group: ZeroMQTransport(group, encrypt=True)"
        )
    return lambda group, largest_bytes: transport(group)


def _make_room(world_size: int) -> None:
    """Raise this process's limit of open files, if links to all ranks need more.

    Raises:
        ValueError: The system allows too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_FILES + _FILES * world_size
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"links among {world_size} ranks need about {needed} open files in each process, and "
            f"this system allows {hard}: raise it (ulimit -Hn {needed}, or LimitNOFILE= of the "
            "service), or train fewer ranks"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _bind(listener: "zmq.Socket[bytes]", address: str, *, one_host: bool) -> str:
    """Listen on a free port; return the endpoint.

    Raises:
        ValueError: The interface is not of this host, or the others cannot reach it.
    """
    where = f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*"
    listener.setsockopt(zmq.IPV6, int(":" in address))
    try:
        try:
            listener.bind(where)
        except zmq.ZMQError:  # an interface may have an IPv6 address only
            listener.setsockopt(zmq.IPV6, 1)
            listener.bind(where)
    except zmq.ZMQError as error:
        raise ValueError(
            f"cannot listen on bind={address!r} ({error}): it must be an address or "
            "interface of this host"
        ) from error
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    check_bound(address, _address_of(endpoint), one_host=one_host)
    return endpoint


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _address_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _close_in_child() -> None:
    """Close a forked child's copies of all links.

    1. A rank forks the workers of a `DataLoader`, and is killed.
    2. The kernel ends its connections only when the last copy of them is closed.
    3. So the others would not see it die as long as a worker lives.
    """
    links = [link for each in [*_open] if not each._closed for link in each.introductions.items()]
    mine = {each.rank for each in [*_open]}
    listened = {_port_of(endpoint) for rank, (endpoint, _) in links if rank in mine}
    connected = {(_address_of(end), _port_of(end)) for _, (end, _) in links}
    for file in [*Path("/proc/self/fd").iterdir()] if links else ():
        descriptor = int(file.name)
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue  # a copy of a pipe would stay open, and its reader see no end
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                is_link = copy.getsockname()[1] in listened
                if not is_link:
                    address, port, *_ = copy.getpeername()
                    is_link = (address.removeprefix("::ffff:"), port) in connected
                if is_link:
                    os.close(descriptor)


def _at_exit() -> None:
    """End unclosed transports without touching sockets that other threads may still use."""
    for transport in [*_open]:
        transport.silence()
    gc._atexit()


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_close_in_child)

# At exit, pyzmq stops the helper of zero-copy sends before older finalizers run, such as those of
# sessions, which still send LEAVE. Finalizers run in reverse order of creation, so creating pyzmq's
# first makes it run last.
atexit.unregister(gc._atexit)
weakref.finalize(ZeroMQTransport, _at_exit)
