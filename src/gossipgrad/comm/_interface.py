"""Selection of the network interface that a rank listens on."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection
from pathlib import Path

from gossipgrad.comm._group import Group

__all__ = ["check_bound", "here", "interface_of", "joining_address"]

BIND = "GOSSIPGRAD_BIND"
_WAY_OUT = (
    f"name the interface: {BIND}=10.0.0.7 or {BIND}=eth1 in the environment, or "
    "transport=lambda group: ZeroMQTransport(group, bind='10.0.0.7')"
)


def interface_of(group: Group, asked: str | None = None) -> tuple[str, bool]:
    """Return the interface to listen on, and whether all ranks are on one host.

    The interface is given by the argument or by `GOSSIPGRAD_BIND`. Otherwise it is loopback if all
    ranks are on one host, or the address from which this host reaches `MASTER_ADDR`, or the one
    that its name resolves to. A collective over `group` in every case.

    Raises:
        ValueError: If another host could not reach the address.
    """
    asked = asked or os.environ.get(BIND)
    one_host = len(set(group.all_gather_object(here()))) == 1
    if asked or one_host:
        return asked or "127.0.0.1", one_host
    address = _own_address(os.environ.get("MASTER_ADDR"))
    if _is_loopback(address):
        raise ValueError(
            f"this host's name {socket.gethostname()!r} resolves to the loopback address "
            f"{address}, which other hosts cannot reach: {_WAY_OUT}"
        )
    return address, one_host


def check_bound(asked: str, address: str, *, one_host: bool) -> None:
    """Refuse a listening address that is every interface, or that other ranks cannot reach.

    Args:
        asked: Address or name of an interface.
        address: The address that the socket is bound to.
        one_host: Whether all ranks are on this host.

    Raises:
        ValueError: The address is one of these.
    """
    if _parsed(address).is_unspecified:
        raise ValueError(f"bind={asked!r} means every interface, not an address: {_WAY_OUT}")
    if _is_loopback(address) and not one_host:
        raise ValueError(
            f"bind={asked!r} is a loopback address, {address}, and ranks are on several hosts, "
            f"which cannot reach it: {_WAY_OUT}"
        )


def joining_address(others: Collection[str], *, towards: str) -> str:
    """Return the address that a joiner listens on, reachable by the other ranks; local.

    This is `GOSSIPGRAD_BIND`, else loopback if the others listen there, else the address from which
    this host reaches `towards`.

    Raises:
        ValueError: If they could not reach it.
    """
    are_local = [_is_loopback(other) for other in others]
    asked = os.environ.get(BIND) or ("127.0.0.1" if any(are_local) else _own_address(towards))
    if _is_loopback(asked) and not all(are_local):
        raise ValueError(
            f"ranks of the run listen on {', '.join(sorted(set(others)))}, and this one would "
            f"listen on {asked}, where they cannot reach it: name an interface that they reach, "
            f"{BIND}=10.0.0.7 or {BIND}=eth1 in the environment"
        )
    return asked


def here() -> str:
    """Identify this host and its network namespace, which has its own loopback."""
    network = ""
    with contextlib.suppress(OSError):
        network = str(Path("/proc/self/ns/net").readlink())
    return f"{socket.gethostname()} {network}"


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address of any kind of socket; `0.0.0.0` instead of `::ffff:0.0.0.0`."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _is_loopback(address: str) -> bool:
    try:
        return _parsed(address).is_loopback
    except ValueError:  # a name
        return address in ("lo", "localhost")


def _own_address(towards: str | None) -> str:
    if towards is not None:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((towards, 9))  # sends nothing: it only looks up the route
            address = probe.getsockname()[0]
            if not _is_loopback(address):
                return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ValueError(
            f"this host's name {socket.gethostname()!r} resolves to no address ({error}): "
            f"{_WAY_OUT}"
        ) from error
