"""What went over a TCP connection of another library's, who is at its other end, and its end."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Peer", "Traffic", "close_connection", "host_of", "peer_of", "traffic"]

# `struct tcp_info` of Linux: tcpi_bytes_acked and tcpi_bytes_received, since 4.1. Elsewhere it has
# another layout, or is not told.
_INFO = struct.Struct("=120xQQ")
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a connection.

    Attributes:
        taken_bytes: What the other end has confirmed to have got.
        heard_bytes: What came from there.
    """

    taken_bytes: int
    heard_bytes: int


def host_of(address: str) -> str:
    """An address in one spelling, whatever kind of socket it was seen on.

    Example:
        >>> host_of("::ffff:10.0.0.7"), host_of("fe80::1%eth0")
        ('10.0.0.7', 'fe80::1')
    """
    plain = address.partition("%")[0]
    try:
        parsed = ipaddress.ip_address(plain)
    except ValueError:
        return plain
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def peer_of(descriptor: int, port: int) -> Peer | None:
    """Who is at the other end of a connection that was accepted on `port`; None if it is none."""
    with contextlib.suppress(OSError), _borrowed(descriptor, port) as connection:
        if connection is not None:
            return _peer(connection)
    return None


def traffic(descriptor: int, port: int) -> Traffic | None:
    """What went over a connection that was accepted on `port`.

    None if the descriptor is of no such connection (any more), or the system does not tell.
    """
    with contextlib.suppress(OSError), _borrowed(descriptor, port) as connection:
        if connection is not None and _TCP_INFO is not None:
            told = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size)
            # Some that look like Linux leave these fields 0, which no connection has that spoke.
            if len(told) == _INFO.size and any(told[-16:]):
                return Traffic(*_INFO.unpack(told))
    return None


def close_connection(descriptor: int, port: int, host: str, peer_port: int | None = None) -> bool:
    """Ends a connection that was accepted on `port`; its owner finds it closed.

    Args:
        descriptor: Of the connection. If it is another one's meanwhile, nothing is done.
        port: Where it was accepted.
        host: Who is at its other end.
        peer_port: With which port there; None: any.
    """
    with contextlib.suppress(OSError), _borrowed(descriptor, port) as connection:
        if connection is not None:
            found = _peer(connection)
            if found.host == host and peer_port in (None, found.port):
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _peer(connection: socket.socket) -> Peer:
    host, port = connection.getpeername()[:2]
    return Peer(host_of(host), port)


@contextmanager
def _borrowed(descriptor: int, port: int) -> Iterator[socket.socket | None]:
    # A copy keeps the connection meant from being another one in the meantime.
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # a file or a pipe
        os.close(copy)
        raise
    with connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        is_ours = is_tcp and connection.type == socket.SOCK_STREAM
        yield connection if is_ours and connection.getsockname()[1] == port else None
