"""Which network interface a rank listens on."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gossipgrad.comm._group import Group

__all__ = [
    "BIND",
    "Interface",
    "check_bound",
    "here",
    "interface_of",
    "is_loopback",
    "joining_address",
]

BIND = "GOSSIPGRAD_BIND"
_EVERYWHERE = ("0.0.0.0", "::")
_WAY_OUT = (
    f"name the interface: {BIND}=10.0.0.7 or {BIND}=eth1 in the environment, or "
    "transport=lambda group: ZeroMQTransport(group, bind='10.0.0.7')"
)


@dataclass(frozen=True, slots=True)
class Interface:
    """Where a rank listens.

    Attributes:
        address: Address or name of the interface.
        one_host: Whether all ranks are on this host.
    """

    address: str
    one_host: bool


def interface_of(group: Group, asked: str | None = None) -> Interface:
    """The one asked for; else loopback if all ranks are on one host; else this host's.

    What `GOSSIPGRAD_BIND` says is asked for, too: an address, or the name of an interface. A
    host's address is the one from which it reaches `MASTER_ADDR`, if that is set, else the one its
    name resolves to. A collective over `group`, whether an address is asked for or not.

    Raises:
        ValueError: If another host could not reach the address.
    """
    asked = asked or os.environ.get(BIND)
    one_host = len(set(group.all_gather_object(here()))) == 1
    if asked:
        return Interface(asked, one_host)
    if one_host:
        return Interface("127.0.0.1", one_host)
    address = _own_address(os.environ.get("MASTER_ADDR"))
    if address.startswith("127."):
        raise ValueError(
            f"this host's name {socket.gethostname()!r} resolves to the loopback address "
            f"{address}, which other hosts cannot reach: {_WAY_OUT}"
        )
    return Interface(address, one_host)


def check_bound(interface: Interface, host: str) -> None:
    """Refuses where a socket came to listen: every interface, or one that others do not reach.

    Args:
        interface: What was asked for.
        host: The address that came of it.

    Raises:
        ValueError: It is such.
    """
    asked = interface.address
    address = host_of(host)
    if address in _EVERYWHERE:
        raise ValueError(f"bind={asked!r} is every interface, and no address to tell: {_WAY_OUT}")
    if is_loopback(address) and not interface.one_host:
        raise ValueError(
            f"bind={asked!r} is a loopback address, {address}, and ranks are on several hosts, "
            f"which cannot reach it: {_WAY_OUT}"
        )


def joining_address(others: Collection[str], *, towards: str) -> str:
    """Where one that joins listens, so that ranks that listen at other addresses reach it; local.

    What `GOSSIPGRAD_BIND` says, else loopback if the others listen there, else the address from
    which this host reaches `towards`.

    Raises:
        ValueError: If they could not reach it.
    """
    asked = os.environ.get(BIND)
    if not asked:
        local = any(is_loopback(other) for other in others)
        asked = "127.0.0.1" if local else _own_address(towards)
    if is_loopback(asked) and not all(is_loopback(other) for other in others):
        raise ValueError(
            f"ranks of the run listen on {', '.join(sorted(set(others)))}, and this one would "
            f"listen on {asked}, where they cannot reach it: name an interface that they reach, "
            f"{BIND}=10.0.0.7 or {BIND}=eth1 in the environment"
        )
    return asked


def is_loopback(address: str) -> bool:
    """Whether an address is of no use on another host."""
    host = host_of(address)
    return host.startswith("127.") or host in ("::1", "lo", "localhost")


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


def here() -> str:
    """This host, and the network namespace on it."""
    return f"{socket.gethostname()} {_network()}"


def _own_address(master: str | None) -> str:
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
