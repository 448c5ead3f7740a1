"""One TCP connection between two ranks: both prove that they know the secret, then messages flow.

    the rank that connects                       the rank that listens
      HELLO, its rank, the other's, a challenge ──>
      <── a challenge, proof of the secret
      proof of the secret ──>
      <── welcome, or not now
      messages <──────────────────────────────────> messages

A message is its sizes, its header and its payload. A payload is received straight into the memory
that its receiver gets, and sent from the memory that its sender gave: Python copies no byte of it.
Between processes of one host that can read each other's memory, a descriptor of a payload is sent
instead (`_shared_memory.py`). A note is a message of the links themselves.
"""

import enum
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm._access import Access
from gossipgrad.comm._shared_memory import DESCRIPTOR_BYTES, Reader
from gossipgrad.comm._transport import Received, Ticket

__all__ = [
    *("MOST_HEADER_BYTES", "NUMBER", "Connection", "NotNowError", "Note", "Outgoing"),
    *("StrangerError", "is_local", "view_of"),
]

MOST_HEADER_BYTES = 1 << 14
_HELLO = struct.Struct("!12sBII16s")  # magic, version, sender, receiver, challenge
_MAGIC, _VERSION = b"gossip hello", 2
_CHALLENGE_BYTES, _PROOF_BYTES = 16, 32
_SIZES = struct.Struct("!IQ")  # bytes of the header and of the payload
_NOTE = (1 << 32) - 1  # as the size of a header: a note, whose kind stands for the payload's
_IN_MEMORY = 1 << 31  # in the size of a header: a descriptor and a number follow, and no payload
NUMBER = struct.Struct("!Q")  # of a payload that lies in memory, on its link
_WELCOME, _NOT_NOW = b"\1", b"\0"
_READS = 16  # in a row from one connection, before others get their turn
_COPY_BELOW_BYTES = 1 << 12  # below this a copy is cheaper than a ticket
_VIEWS = 64  # buffers that one call of the system may send
_KEEPALIVE_SECONDS = (10, 5)  # the idle time before a connection is probed, and the interval
_KEEPALIVE_TRIES = 4
_UNANSWERED_MILLISECONDS = 30_000  # a host that confirms nothing for so long is dead


class Note(enum.IntEnum):
    """A message without a header, of a link itself."""

    NOTHING = 0  # the receiver drops it
    CAN_YOU_READ = 1  # a piece of memory, by its descriptor
    CAN_READ = 2  # it is possible: payloads may lie in memory
    HAS_READ = 3  # the payload with this number

    @property
    def size_bytes(self) -> int:
        """Bytes of what follows."""
        return {Note.CAN_YOU_READ: DESCRIPTOR_BYTES, Note.HAS_READ: NUMBER.size}.get(self, 0)


class StrangerError(ConnectionError):
    """The other end is no rank of this run."""


class NotNowError(ConnectionError):
    """The other end is a rank of this run that does not take this connection now."""


class Outgoing:
    """The messages to one rank that have not left; the caller holds a lock."""

    def __init__(self) -> None:
        self.shares = False  # whether the other end can read this process's memory
        self._unread: dict[int, Ticket] = {}  # of payloads that the other end has not read yet
        self._number = 0
        self._views: deque[tuple[memoryview, Ticket | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._views)

    def put(
        self,
        header: bytes,
        body: memoryview | None,
        ticket: Ticket | None,
        descriptor: bytes | None = None,
    ) -> None:
        """Queue a message; a large body is not copied, and one that can be read there not sent."""
        size_bytes = 0 if body is None else body.nbytes
        if descriptor is not None and self.shares:
            self._number += 1
            if ticket is not None:
                self._unread[self._number] = ticket
            sizes = _SIZES.pack(len(header) | _IN_MEMORY, size_bytes)
            self._views.append(
                (memoryview(sizes + header + descriptor + NUMBER.pack(self._number)), None)
            )
            return
        head = _SIZES.pack(len(header), size_bytes) + header
        if body is None or size_bytes < _COPY_BELOW_BYTES:
            self._views.append((memoryview(head + (b"" if body is None else bytes(body))), None))
            if ticket is not None:
                ticket.done = True
        else:
            self._views.append((memoryview(head), None))
            self._views.append((body, ticket))

    def put_note(self, note: "Note", content: bytes = b"") -> None:
        """Queue a note."""
        self._views.append((memoryview(_SIZES.pack(_NOTE, note) + content), None))

    def read(self, number: int) -> None:
        """The other end has read a payload."""
        if (ticket := self._unread.pop(number, None)) is not None:
            ticket.done = True

    def first(self) -> list[memoryview]:
        """Return the next bytes to send."""
        return [view for view, _ in list(self._views)[:_VIEWS]]

    def remove(self, sent_bytes: int) -> None:
        """Remove what was sent."""
        while self._views:
            view, ticket = self._views[0]
            if sent_bytes < view.nbytes:
                self._views[0] = view[sent_bytes:], ticket
                return
            sent_bytes -= view.nbytes
            self._views.popleft()
            if ticket is not None:
                ticket.done = True

    def drop(self) -> None:
        """Drop everything: nobody would receive it."""
        for ticket in self._unread.values():
            ticket.done = True
        self._unread.clear()
        for _, ticket in self._views:
            if ticket is not None:
                ticket.done = True
        self._views.clear()


class Connection:
    """A non-blocking socket, and what it is in the middle of."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        rank: int,
        peer: int | None,
        access: Access,
        most_bytes: int,
        admit: Callable[["Connection"], bool],
        memory: Callable[[bytes, int], Tensor | None],
        reader: Reader,
        has_read: Callable[["Connection", bytes], None],
    ) -> None:
        # The peer of an accepted connection is known only when it has proven itself.
        self.sock, self.peer, self.is_dialled = sock, peer, peer is not None
        self.is_up = False  # messages may be sent
        self.writes = False  # its loop waits until the socket takes more bytes
        self.arrived: list[Received] = []  # whole messages, for the caller to remove
        self.notes: list[tuple[Note, bytes]] = []  # about memory, for the caller to remove
        self._rank, self._access, self._most_bytes, self._admit = rank, access, most_bytes, admit
        self._memory, self.reader, self._has_read = memory, reader, has_read
        self._script = self._dial() if self.is_dialled else self._answer()
        self._wanted = memoryview(b"")

    def begin(self) -> None:
        """Start to speak, once connected; raises `OSError` if it is not."""
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        _tune(self.sock)
        self._go_on()

    def read(self) -> None:
        """Read what has arrived, in part or whole; raises `OSError` when the connection is over."""
        for _ in range(_READS):
            try:
                count = self.sock.recv_into(self._wanted)
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise ConnectionResetError("the other end has closed the connection")
            is_whole = count == self._wanted.nbytes
            self._wanted = self._wanted[count:]
            if not is_whole:
                return  # nothing is left; the loop returns when there is
            self._go_on()

    def write(self, views: list[memoryview]) -> int:
        """Send as many bytes as the socket takes; return their number."""
        try:
            return self.sock.sendmsg(views)
        except (BlockingIOError, InterruptedError):
            return 0

    def _go_on(self) -> None:
        while not self._wanted:
            self._wanted = next(self._script)

    def _dial(self) -> Iterator[memoryview]:
        assert self.peer is not None
        mine = os.urandom(_CHALLENGE_BYTES)
        hello = _HELLO.pack(_MAGIC, _VERSION, self._rank, self.peer, mine)
        self._say(hello)
        answer = bytearray(_CHALLENGE_BYTES + _PROOF_BYTES)
        yield memoryview(answer)
        theirs, proof = answer[:_CHALLENGE_BYTES], answer[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, self._access.proof(b"answers", hello, theirs)):
            raise StrangerError(f"rank {self.peer} has another secret")
        self._say(self._access.proof(b"dials", hello, theirs))
        welcome = bytearray(1)
        yield memoryview(welcome)
        if welcome != _WELCOME:
            raise NotNowError(f"rank {self.peer} takes no connection now")
        self.is_up = True
        yield from self._messages()

    def _answer(self) -> Iterator[memoryview]:
        hello = bytearray(_HELLO.size)
        yield memoryview(hello)
        magic, version, peer, receiver, _ = _HELLO.unpack(hello)
        if (magic, version, receiver) != (_MAGIC, _VERSION, self._rank) or peer == self._rank:
            raise StrangerError("no hello to this rank")
        mine = os.urandom(_CHALLENGE_BYTES)
        self._say(mine + self._access.proof(b"answers", hello, mine))
        proof = bytearray(_PROOF_BYTES)
        yield memoryview(proof)
        if not hmac.compare_digest(proof, self._access.proof(b"dials", hello, mine)):
            raise StrangerError("no proof of the secret")
        self.peer = peer
        if not self._admit(self):
            self._say(_NOT_NOW)
            raise NotNowError("not now")
        self._say(_WELCOME)
        self.is_up = True
        yield from self._messages()

    def _messages(self) -> Iterator[memoryview]:
        while True:
            sizes = bytearray(_SIZES.size)
            yield memoryview(sizes)
            header_bytes, size_bytes = _SIZES.unpack(sizes)
            if header_bytes == _NOTE:
                if size_bytes not in Note.__members__.values():
                    raise StrangerError(f"an unknown note {size_bytes}")
                note = Note(size_bytes)
                if content := bytearray(note.size_bytes):
                    yield memoryview(content)
                self.notes.append((note, bytes(content)))
                continue
            header_bytes, is_in_memory = header_bytes & ~_IN_MEMORY, header_bytes & _IN_MEMORY
            if header_bytes > MOST_HEADER_BYTES or size_bytes > self._most_bytes:
                raise StrangerError(f"a message of {header_bytes} + {size_bytes} bytes")
            header = bytearray(header_bytes)
            yield memoryview(header)
            payload = None
            if is_in_memory:
                where = bytearray(DESCRIPTOR_BYTES + NUMBER.size)
                yield memoryview(where)
                payload = self.reader.read(where[:DESCRIPTOR_BYTES], size_bytes)
                release = partial(self._has_read, self, bytes(where[DESCRIPTOR_BYTES:]))
                self.arrived.append(Received(bytes(header), payload, release))
                continue
            if size_bytes:
                payload = self._memory(bytes(header), size_bytes)
                if payload is None:
                    payload = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
                yield view_of(payload)
            self.arrived.append(Received(bytes(header), payload))

    def _say(self, message: bytes) -> None:
        """Send a part of the hello, which the empty buffer of a new connection takes at once."""
        if self.sock.send(message) != len(message):
            raise ConnectionError("the connection takes no hello")


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connection are in one network namespace of one host."""
    return sock.getpeername()[0] == sock.getsockname()[0]


def view_of(payload: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    return payload.reshape(-1).view(torch.uint8).numpy().data


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and find a dead host without Python."""
    idle_seconds, interval_seconds = _KEEPALIVE_SECONDS
    options: list[tuple[int, str, Any]] = [
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", idle_seconds),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", interval_seconds),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", _KEEPALIVE_TRIES),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", _UNANSWERED_MILLISECONDS),
    ]
    for level, name, value in options:
        if hasattr(socket, name):  # not every system has all
            sock.setsockopt(level, getattr(socket, name), value)
