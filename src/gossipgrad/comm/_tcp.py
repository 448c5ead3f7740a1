"""What went over a TCP connection of another library's, and its end."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Traffic", "close_connection", "traffic"]

# `struct tcp_info` of Linux: tcpi_bytes_acked and tcpi_bytes_received, since 4.1.
_INFO = struct.Struct("=120xQQ")
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a connection.

    Attributes:
        taken_bytes: What the other end has confirmed to have got.
        heard_bytes: What came from there.
    """

    taken_bytes: int
    heard_bytes: int


def traffic(descriptor: int, port: int) -> Traffic | None:
    """What went over a connection that was accepted on `port`.

    None if the descriptor is of no such connection (any more), or the system does not tell.
    """
    with contextlib.suppress(OSError), _borrowed(descriptor, port) as connection:
        if connection is not None and _TCP_INFO is not None:
            told = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size)
            if len(told) == _INFO.size:
                return Traffic(*_INFO.unpack(told))
    return None


def close_connection(descriptor: int, port: int | None) -> None:
    """Ends a connection that was accepted on `port`; its owner finds it closed."""
    if port is not None:
        with contextlib.suppress(OSError), _borrowed(descriptor, port) as connection:
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int, port: int) -> Iterator[socket.socket | None]:
    # A copy keeps the connection meant from being another one in the meantime.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(descriptor)) as connection:
        yield connection if connection.getsockname()[1] == port else None
