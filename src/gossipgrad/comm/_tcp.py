"""Links over plain TCP: one connection a pair of ranks, opened when one of them first needs it.

One thread moves the bytes of all links while the process trains: the calls that copy between a
socket and memory run without Python's lock. Bytes are not encrypted; that is the network's to do.

Who connects, where both ends of a link want it at once:

1. Ranks 0 and 1 reach a round with each other, and both connect.
2. Each gets the hello of the other while its own is under way.
3. Rank 0, the lower one, answers "not now"; rank 1 takes the connection of rank 0, and drops
   its own. Nothing was sent on that one: messages wait in the link until it is up.

A rank whose end of a link broke connects again; the other end may not have noticed:

1. Rank 1 sees its connection end, and its channel has forgotten the link.
2. Rank 0 still waits for bytes of the old connection, when rank 1 connects.
3. Rank 0 answers "not now", and sends an empty message on the old connection, which the host
   of rank 1 answers with a reset. Rank 0 reports rank 1 as lost.
4. It takes the next attempt when its own channel has forgotten the link, too: so `Lost` stands
   between the messages of the two connections.
"""

import contextlib
import errno
import os
import re
import resource
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm._access import Access, check_same, meet_access
from gossipgrad.comm._asked_store import Deadline
from gossipgrad.comm._group import Group
from gossipgrad.comm._interface import BIND, address_of_interface, check_bound, interface_of
from gossipgrad.comm._shared_memory import Arena, Reader, offer
from gossipgrad.comm._tcp_connection import (
    MOST_HEADER_BYTES,
    NUMBER,
    Connection,
    Note,
    NotNowError,
    Outgoing,
    StrangerError,
    is_local,
    view_of,
)
from gossipgrad.comm._transport import Lost, Received, Ticket, Transport
from gossipgrad.errors import AgreementError, GossipError

__all__ = ["MOST_BYTES", "TCPTransport", "resolve_transport"]

_FILES, _OTHER_FILES = 2, 256  # of a link, and of the rest of the process
_GONE_AFTER_FAILURES = 2  # every rank listens before it tells its address: refusal means gone
_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 30.0  # for the hello of a connection
_LOOK_SECONDS = 1.0  # how often connections without a hello are looked at
_WAITING = 512  # connections that the system keeps until this rank accepts them
_DIRECT_BYTES = 1 << 14  # a smaller message leaves in the thread that sends it
_END_SECONDS = 5.0
MOST_BYTES = 1 << 32  # of a message
_PROBE_BYTES = 1 << 16  # by which a process shows that it can read the memory of another
_PING = b"gossipgrad ping"
_PING_SECONDS, _PING_POLL_SECONDS = 10.0, 0.05
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Za-z:.%]+\]|[^:/\s]+):\d{1,5}")

Memory = Callable[[bytes, int], Tensor | None]
"""Where to receive the payload of a message with this header, of so many bytes."""

_all: "weakref.WeakSet[TCPTransport]" = weakref.WeakSet()


class _Link:
    """A rank, the messages to it, and the connection that is used or made."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.outgoing = Outgoing()
        self.connection: Connection | None = None  # between two attempts to connect
        self.is_lost = False  # it was up and ended, or cannot come up
        self.is_writing = False  # the thread of the links sends the first messages now
        self.failures = 0  # attempts to connect without an answer, in a row
        self.retry_seconds = 0.0  # when to connect next (`time.monotonic`)

    @property
    def is_up(self) -> bool:
        return self.connection is not None and self.connection.is_up


class TCPTransport:
    """Links over TCP; see the module.

    Both ends of a connection prove that they know the run's secret: random bytes from its store,
    or the file that `GOSSIPGRAD_SECRET_FILE` names on every rank. Otherwise they close it. A rank
    that dies is reported as `Lost` when its kernel ends its connections; a host that dies, when it
    confirms nothing for half a minute.

    Args:
        group: Used once, to agree on the secret and exchange addresses (a collective).
        max_payload_bytes: A larger message ends its connection.
        bind: Address or name of the interface to listen on; None: the value of `GOSSIPGRAD_BIND`.
            By default loopback if all ranks are on one host, else the interface towards
            `MASTER_ADDR`, or the one this host's name resolves to.

    Attributes:
        introductions: The introductions of all known ranks, including this one.

    Raises:
        ValueError: If the interface cannot be listened on, or cannot be reached from other hosts;
            if the file with the secret is invalid; if the system allows too few open files.
        AgreementError: If ranks have different secrets, or only some have a file.
        GossipError: If a rank dies while addresses are exchanged, or its secret is invalid; or if a
            message from each rank to the next does not arrive.
    """

    def __init__(
        self, group: Group, *, max_payload_bytes: int = MOST_BYTES, bind: str | None = None
    ) -> None:
        access = meet_access(group)
        address, one_host = interface_of(group, bind)
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
        secret: str | None,
        bind: str = "127.0.0.1",
        max_payload_bytes: int = MOST_BYTES,
    ) -> "TCPTransport":
        """Create the transport of a joiner; local.

        The others connect to it by its `introduction` (`add_peer`).

        Args:
            rank: Its number, which no rank had before.
            world_size: As on the others.
            introductions: The introductions of the ranks that it may send to.
            secret: That of the others (`published_secret`); None: it is in a file.
            bind: Address or name of the interface to listen on.
            max_payload_bytes: As on the others.

        Raises:
            ValueError: The interface cannot be listened on, or there is no secret.
            AgreementError: The others have another secret, or only one of both has a file.
        """
        self = cls.__new__(cls)
        with self._listen(Access.resolve(secret), rank, world_size, max_payload_bytes, bind):
            for other, introduction in introductions.items():
                self.add_peer(other, introduction)
        return self

    @property
    def address(self) -> str:
        """The address that this rank listens on, without the port."""
        return _address_of(self.introduction[0])

    @property
    def introduction(self) -> list[Any]:
        """This rank's address and the fingerprint of its secret's file; values are JSON's."""
        return self.introductions[self.rank]

    @property
    def linked(self) -> list[int]:
        """Ranks that see a connection to this one end when it closes."""
        with self._filled:
            return [peer for peer, link in self._links.items() if link.is_up]

    @property
    def published_secret(self) -> str | None:
        """The secret that joiners get from the run's store, None if it is in a file."""
        return self._access.published

    def add_peer(self, rank: int, introduction: Sequence[Any]) -> None:
        """Add a rank by its introduction; local, from any thread.

        Raises:
            AgreementError: It has another secret, only one of both has a file, or another rank has
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

    def receive_into(self, memory: "Memory") -> None:
        """Receive payloads where `memory` says; it is called in the thread of the links."""
        self._memory = memory

    def open(self, peer: int) -> None:
        """Connect to `peer` and watch the connection, if its address is known."""
        with self._filled:
            self._link(peer)

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Queue a message; `payload` is read until the ticket is done.

        A small one leaves at once where none waits before it.
        """
        body = None if payload is None or payload.numel() == 0 else view_of(payload)
        if body is not None and body.nbytes > self.max_payload_bytes:
            raise ValueError(
                f"a message of {body.nbytes} bytes is above max_payload_bytes="
                f"{self.max_payload_bytes}: use smaller buckets, or raise it on all ranks"
            )
        assert len(header) <= MOST_HEADER_BYTES, len(header)
        with self._filled:
            link = self._link(peer)
            if link is None or link.is_lost:
                if ticket is not None:
                    ticket.done = True
                return
            descriptor = None if payload is None else offer(payload)
            is_first = not link.outgoing and not link.is_writing
            link.outgoing.put(header, body, ticket, descriptor)
            is_in_memory = descriptor is not None and link.outgoing.shares
            is_small = body is None or body.nbytes < _DIRECT_BYTES or is_in_memory
            self._push(link, at_once=is_first and is_small)

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Return received messages, and ranks that were lost; perhaps none, and early."""
        with self._filled:
            if not self._events and timeout_seconds > 0:  # also when closed: callers loop
                self._filled.wait(timeout_seconds)
            events, self._events = self._events, []
            return [] if self._is_closed else events

    def wake(self) -> None:
        """Let `receive` return early."""
        with self._filled:
            self._filled.notify_all()

    def forget(self, peer: int) -> None:
        """Close the link to `peer` and drop its queued messages."""
        with self._filled:
            if (link := self._links.pop(peer, None)) is not None:
                self._end(link)
                self._wake()

    def close(self, linger_seconds: float = 0.0) -> None:
        """Send queued messages for at most `linger_seconds`, then close all links."""
        if os.getpid() != self._process:
            return  # a forked child: it has closed its copies
        with self._filled:
            self._is_closed = True
            if self._until_seconds is None:
                self._until_seconds = time.monotonic() + linger_seconds
            self._filled.notify_all()
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(linger_seconds + _END_SECONDS)

    def abandon(self) -> None:
        """Close a forked child's copies of all descriptors, without locks: threads are gone.

        1. A rank forks the workers of a `DataLoader`, and is killed.
        2. The kernel ends its connections only when the last copy of them is closed.
        3. So the others would not see it die as long as a worker lives.
        """
        self._is_closed = self._is_over = True
        self._selector.close()  # the parent's epoll stays as it is
        for sock in (self._listener, self._waker, self._wakes):
            sock.close()
        for connection in [*self._connections]:
            connection.sock.close()

    def _link(self, peer: int) -> _Link | None:
        """Return the link to a rank, and connect if there is none; None if it is not known."""
        link = self._links.get(peer)
        if link is None and peer in self.introductions and not self._is_closed:
            link = self._links[peer] = _Link(peer)
            self._look_at(link)
        return None if self._is_closed else link

    def _push(self, link: _Link, *, at_once: bool) -> None:
        """Let queued messages leave, `at_once` in this thread; holding the lock."""
        connection = link.connection
        if at_once and connection is not None and connection.is_up:
            with contextlib.suppress(OSError):  # the thread of the links sees it, too
                link.outgoing.remove(connection.write(link.outgoing.first()))
        if link.outgoing and connection is not None and not connection.writes:
            self._look_at(link)

    def _has_read(self, connection: Connection, number: bytes) -> None:
        """Let the other end write a payload's memory again; from any thread."""
        with self._filled:
            if (link := self._link_of(connection)) is not None:
                is_first = not link.outgoing and not link.is_writing
                link.outgoing.put_note(Note.HAS_READ, number)
                self._push(link, at_once=is_first)

    def _prove_links(self, group: Group) -> None:
        """Send a message to the next rank, and await that of the one before; all raise, or none."""
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
        _make_room(world_size)
        self.rank, self.world_size = rank, world_size
        self.max_payload_bytes = max_payload_bytes
        self._listener = _bind(address, one_host=one_host)
        host, port, *_ = self._listener.getsockname()
        endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.introductions: dict[int, list[Any]] = {rank: [endpoint, access.fingerprint]}
        self._access, self._process = access, os.getpid()
        self._links: dict[int, _Link] = {}
        self._memory: Memory = lambda header, size_bytes: None
        self._is_closed = False  # no message is taken any more
        self._filled = threading.Condition(threading.RLock())
        self._events: list[Received | Lost] = []
        self._arena = Arena([_PROBE_BYTES])
        self._probe = offer(self._arena.empty(_PROBE_BYTES, torch.uint8))
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakes = socket.socketpair()
        self._is_woken = False
        self._connections: set[Connection] = set()
        self._hellos: dict[Connection, float] = {}  # until when they may take
        self._changed: set[_Link] = set()  # to be connected, or with messages to send
        self._dropped: list[Connection] = []  # by other threads, to be closed
        self._until_seconds: float | None = None  # when to end, once closing
        self._is_over = False
        for each in (self._listener, self._waker, self._wakes):
            each.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        _all.add(self)
        self._thread = threading.Thread(target=self._work, name="gossipgrad-links", daemon=True)
        self._thread.start()
        try:
            yield
        except BaseException:
            self.close()
            raise

    # -- in the thread of the links ---------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        finally:
            with self._filled:
                for link in self._links.values():
                    self._end(link)
                self._is_closed = True
                self._filled.notify_all()
            self._close_all()

    def _turn(self) -> None:
        ready = self._selector.select(self._dial_and_look())
        for key, mask in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakes:
                # 1. A thread queues a message, and finds `_is_woken` set: it sends no byte.
                # 2. So the flag is cleared behind the byte, and before this thread looks at queues.
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(64)
                self._is_woken = False
            elif key.data in self._connections:  # not closed in this turn
                self._serve(key.data, mask)

    def _dial_and_look(self) -> float | None:
        """Connect, let messages leave, end what is over; return how long to sleep at most."""
        now, wait = time.monotonic(), None
        with self._filled:
            dropped, self._dropped = self._dropped, []
            changed, self._changed = self._changed, set()
        for connection in dropped:
            self._close(connection)
        for link in changed:
            connection = link.connection
            if link.is_lost:
                continue
            if connection is not None:
                if connection.is_up:
                    self._watch(connection, writes=bool(link.outgoing))
            elif link.retry_seconds <= now:
                self._dial(link)
            else:
                wait = _RETRY_SECONDS
                with self._filled:
                    self._changed.add(link)
        for connection, until_seconds in [*self._hellos.items()]:
            wait = min(wait or _LOOK_SECONDS, _LOOK_SECONDS)
            if now > until_seconds:
                self._fail(connection, TimeoutError("no hello"))
        if self._until_seconds is not None:
            self._end_slowly(now)
            wait = max(0.0, min(wait or _LOOK_SECONDS, self._until_seconds - now))
        return 0.0 if self._is_over else wait

    def _end_slowly(self, now: float) -> None:
        """Once closing: end when all messages have left, and the others have seen the end."""
        with self._filled:
            up = [c for c in (link.connection for link in self._links.values()) if c and c.is_up]
            waits = any(
                link.outgoing or link.is_writing
                for link in self._links.values()
                if not link.is_lost and not link.failures
            )
        assert self._until_seconds is not None
        if now >= self._until_seconds:
            self._is_over = True
        elif not waits:
            # A socket that is closed with unread bytes resets the connection, and what the other
            # end has not read is lost: so this end stops sending, and reads until the other closes.
            for connection in up:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)
            self._is_over = not up

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none is left, or this process has no descriptor left
                return
            self._add(self._connection(sock, None), begins=True)

    def _connection(self, sock: socket.socket, peer: int | None) -> Connection:
        sock.setblocking(False)
        return Connection(
            sock,
            rank=self.rank,
            peer=peer,
            access=self._access,
            most_bytes=self.max_payload_bytes,
            admit=self._admit,
            memory=lambda header, size_bytes: self._memory(header, size_bytes),
            reader=Reader(),  # one each: its memory is freed with the connection
            has_read=self._has_read,
        )

    def _add(self, connection: Connection, *, begins: bool) -> None:
        self._connections.add(connection)
        self._hellos[connection] = time.monotonic() + _HELLO_SECONDS
        events = selectors.EVENT_READ if begins else selectors.EVENT_WRITE
        self._selector.register(connection.sock, events, connection)
        connection.writes = not begins
        if begins:
            try:
                connection.begin()
            except OSError as error:
                self._fail(connection, error)

    def _dial(self, link: _Link) -> None:
        endpoint = self.introductions[link.peer][0]
        host, port = _address_of(endpoint), _port_of(endpoint)
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            connection = self._connection(socket.socket(family), link.peer)
        except OSError as error:
            self._refused(link, error)
            return
        with self._filled:
            link.connection = connection
        self._add(connection, begins=False)
        if (code := connection.sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
            self._fail(connection, OSError(code, os.strerror(code)))

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if not connection.is_up and mask & selectors.EVENT_WRITE:
                self._watch(connection, writes=False)
                connection.begin()
                return
            was_up = connection.is_up
            if mask & selectors.EVENT_READ:
                try:
                    connection.read()
                finally:
                    self._report(connection)
            if connection.is_up:
                if not was_up:
                    self._came_up(connection)
                if connection.writes:
                    self._write(connection)
        except OSError as error:
            self._fail(connection, error)
        except Exception as error:  # as little memory is left as a payload needs, say
            self._fail(connection, ConnectionError(repr(error)))

    def _report(self, connection: Connection) -> None:
        if not connection.arrived and not connection.notes:
            return
        arrived, connection.arrived = connection.arrived, []
        notes, connection.notes = connection.notes, []
        with self._filled:
            if (link := self._link_of(connection)) is None:
                return
            self._events.extend(arrived)
            self._filled.notify_all()
            for note, content in notes:
                self._take_note(link, connection, note, content)

    def _take_note(self, link: _Link, connection: Connection, note: Note, content: bytes) -> None:
        if note is Note.CAN_YOU_READ:
            with contextlib.suppress(OSError):  # then payloads pass the socket
                connection.reader.read(content, 1)
                link.outgoing.put_note(Note.CAN_READ)
                self._look_at(link)
        elif note is Note.CAN_READ:
            link.outgoing.shares = True
        elif note is Note.HAS_READ:
            link.outgoing.read(*NUMBER.unpack(content))

    def _came_up(self, connection: Connection) -> None:
        self._hellos.pop(connection, None)
        with self._filled:
            link = self._link_of(connection)
            if link is not None:
                link.failures = 0
                if self._probe is not None and is_local(connection.sock):
                    link.outgoing.put_note(Note.CAN_YOU_READ, self._probe)
                self._watch(connection, writes=bool(link.outgoing))

    def _write(self, connection: Connection) -> None:
        with self._filled:
            link = self._link_of(connection)
            views = [] if link is None else link.outgoing.first()
            if link is None or not views:
                self._watch(connection, writes=False)
                return
            link.is_writing = True
        try:
            sent_bytes = connection.write(views)
        except ConnectionError:
            # 1. Rank 1 says LEAVE, ends, and its host resets the connection.
            # 2. Rank 0 still sends to it, and has not read all that came before.
            # 3. So rank 0 only stops to write: it reads LEAVE, and then the end.
            with self._filled:
                link.outgoing.drop()
            sent_bytes = 0
        finally:
            with self._filled:
                link.is_writing = False
        with self._filled:
            if link.connection is connection:  # else the queue was dropped
                link.outgoing.remove(sent_bytes)
                if not link.outgoing:
                    self._watch(connection, writes=False)

    def _admit(self, connection: Connection) -> bool:
        """Whether to take an accepted connection of a rank that has proven itself."""
        assert connection.peer is not None
        with self._filled:
            link = self._links.get(connection.peer)
            if link is None:
                link = self._links[connection.peer] = _Link(connection.peer)
            elif link.is_lost:
                return False
            elif link.is_up:
                link.outgoing.put_note(Note.NOTHING)
                self._look_at(link)
                return False
            elif link.connection is not None and self.rank < link.peer:
                return False
            if link.connection is not None:
                self._dropped.append(link.connection)
            link.connection = connection
            return True

    def _fail(self, connection: Connection, error: OSError) -> None:
        self._close(connection)
        with self._filled:
            link = self._link_of(connection)
            if link is None:
                return
            if connection.is_up:
                self._lose(link)
            else:
                link.connection = None
                self._refused(link, error)

    def _refused(self, link: _Link, error: OSError) -> None:
        """Try again, or give up."""
        with self._filled:
            link.retry_seconds = time.monotonic() + _RETRY_SECONDS
            link.failures += 0 if isinstance(error, NotNowError) else 1
            if link.failures >= _GONE_AFTER_FAILURES or isinstance(error, StrangerError):
                self._lose(link)
            else:
                self._changed.add(link)

    def _lose(self, link: _Link) -> None:
        self._end(link)
        self._events.append(Lost(link.peer))
        self._filled.notify_all()

    def _end(self, link: _Link) -> None:
        link.is_lost = True
        link.outgoing.drop()
        if link.connection is not None:
            self._dropped.append(link.connection)
            link.connection = None

    def _link_of(self, connection: Connection) -> _Link | None:
        """Return the link that uses a connection, None if none does any more."""
        link = None if connection.peer is None else self._links.get(connection.peer)
        return link if link is not None and link.connection is connection else None

    def _watch(self, connection: Connection, *, writes: bool) -> None:
        if connection.writes != writes and connection in self._connections:
            connection.writes = writes
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
            self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._hellos.pop(connection, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()

    def _close_all(self) -> None:
        for connection in [*self._connections]:
            self._close(connection)
        self._selector.close()
        for sock in (self._listener, self._waker, self._wakes):
            sock.close()

    def _look_at(self, link: _Link) -> None:
        self._changed.add(link)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and threading.current_thread() is not self._thread:
            self._is_woken = True
            with contextlib.suppress(OSError):  # it wakes already, or has ended
                self._waker.send(b"w")


def resolve_transport(transport: Any) -> Callable[[Group], Transport]:
    """Return a function that makes a transport from a group.

    Args:
        transport: `"tcp"`, or such a function.

    Raises:
        ValueError: There is no such transport.
    """
    if transport == "tcp":
        return TCPTransport
    if not callable(transport):
        raise ValueError(
            f"transport must be 'tcp' or a function from a group to a transport, got {transport!r}"
        )
    return transport


def _make_room(world_size: int) -> None:
    """Raise this process's limit of open files, if links to all ranks need more."""
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


def _bind(address: str, *, one_host: bool) -> socket.socket:
    """Listen on a free port; raise `ValueError` where others cannot reach it."""
    try:
        family, *_, where = socket.getaddrinfo(
            address_of_interface(address) or address, 0, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family)
        try:
            listener.bind(where)
            check_bound(address, listener.getsockname()[0], one_host=one_host)
            listener.listen(_WAITING)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"cannot listen on bind={address!r} ({error}): it must be an address or "
            "interface of this host"
        ) from error
    return listener


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _address_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _close_in_child() -> None:
    for transport in [*_all]:
        transport.abandon()


os.register_at_fork(after_in_child=_close_in_child)
