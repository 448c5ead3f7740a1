"""Which network interface a rank listens on."""

import contextlib
import os
import socket
from pathlib import Path

from gossipgrad.comm._group import Group

__all__ = ["BIND", "bind_address"]

BIND = "GOSSIPGRAD_BIND"
_WAY_OUT = (
    f"name the interface: {BIND}=10.0.0.7 or {BIND}=eth1 in the environment, or "
    "transport=lambda group: ZeroMQTransport(group, bind='10.0.0.7')"
)


def bind_address(group: Group, asked: str | None = None) -> str:
    """The address asked for; else loopback if all ranks are on one host; else this host's.

    What `GOSSIPGRAD_BIND` says is asked for, too: an address, or the name of an interface. A
    host's address is the one from which it reaches `MASTER_ADDR`, if that is set, else the one its
    name resolves to. A collective over `group`, whether an address is asked for or not.

    Raises:
        ValueError: If another host could not reach the address.
    """
    asked = asked or os.environ.get(BIND) or None
    here = f"{socket.gethostname()} {_network()}"
    if len(set(group.all_gather_object(here))) == 1 and asked is None:
        return "127.0.0.1"
    if asked in {"0.0.0.0", "::", "*"}:
        raise ValueError(f"bind={asked!r} is every interface, and no address to tell: {_WAY_OUT}")
    address = asked if asked is not None else _own_address()
    if asked is None and address.startswith("127."):
        raise ValueError(
            f"this host's name {socket.gethostname()!r} resolves to the loopback address "
            f"{address}, which other hosts cannot reach: {_WAY_OUT}"
        )
    return address


def _own_address() -> str:
    master = os.environ.get("MASTER_ADDR")
    if master is not None:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((master, 9))  # sends nothing: it only looks up the route
            address = probe.getsockname()[0]
            if not address.startswith("127."):
                return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ValueError(
            f"this host's name {socket.gethostname()!r} resolves to no address ({error}): "
            f"{_WAY_OUT}"
        ) from error


def _network() -> str:
    """Tells apart network namespaces, which share a host's name but not its loopback."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""
