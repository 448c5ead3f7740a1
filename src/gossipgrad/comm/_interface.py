"""Selection of the network interface that a rank listens on."""

import contextlib
import ipaddress
import logging
import os
import socket
import struct
import sys
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from gossipgrad.comm._group import Group

__all__ = [
    *("BIND", "GLOO", "address_of_interface", "check_bound", "gloo_interface"),
    *("here", "interface_of", "interface_towards", "is_address", "joining_address"),
    *("own_address", "set_gloo_interface"),
]

logger = logging.getLogger(__name__)

BIND = "GOSSIPGRAD_BIND"
GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
# Addresses for examples in texts, which no host has: the way there is the default route.
_ELSEWHERE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))
_WAY_OUT = (
    f"name the interface: {BIND}=10.0.0.7 or {BIND}=eth1 in the environment, or "
    "transport=lambda group: TCPTransport(group, bind='10.0.0.7')"
)


def interface_of(group: "Group", asked: str | None = None) -> tuple[str, bool]:
    """Return the interface to listen on, and whether all ranks are on one host; a collective.

    As asked, or by `GOSSIPGRAD_BIND`; else loopback on one host, or the way to `MASTER_ADDR`.
    """
    asked = asked or os.environ.get(BIND)
    one_host = len(set(group.all_gather_object(here()))) == 1
    if asked or one_host:
        return asked or "127.0.0.1", one_host
    return _require_address(os.environ.get("MASTER_ADDR")), one_host


def check_bound(asked: str, address: str, *, one_host: bool) -> None:
    """Refuse a listening address that is every interface, or that other ranks cannot reach."""
    if _parsed(address).is_unspecified:
        raise ValueError(f"bind={asked!r} is every interface, not an address: {_WAY_OUT}")
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
    asked = os.environ.get(BIND) or ("127.0.0.1" if any(are_local) else _require_address(towards))
    if _is_loopback(asked) and not all(are_local):
        raise ValueError(
            f"ranks of the run listen on {', '.join(sorted(set(others)))}, and this one would "
            f"listen on {asked}, where they cannot reach it: name an interface that they reach, "
            f"{BIND}=10.0.0.7 or {BIND}=eth1 in the environment"
        )
    return asked


def here() -> str:
    """Identify this host's boot and its network namespace, which has its own loopback.

    Not by name: cloned machines have equal names, and on them the first namespace has the same
    number.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def own_address(towards: str | None) -> str | None:
    """Return the address of this host on the route to `towards`, or another but loopback; local."""
    own = None if towards is None else _address_on_route(_addresses(towards))
    return own or _address_of_name() or _address_on_route(_ELSEWHERE)


def set_gloo_interface() -> None:
    """Name Gloo's interface for groups that other code makes, where it would listen in vain; local.

    Under torchrun on several hosts, Gloo listens where the name of the host leads, which may be
    loopback alone: `127.0.1.1` in `/etc/hosts`. One host then fails, and the others wait for it for
    half an hour.
    """
    world_size, here_size = (os.environ.get(n, "") for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    master = os.environ.get("MASTER_ADDR")
    if world_size == here_size or not here_size or not master or os.environ.get(GLOO):
        return
    if _address_of_name() is not None:
        return
    asked = os.environ.get(BIND) or own_address(master)
    interface = asked if asked and not is_address(asked) else _interface_with(asked)
    if interface is not None:
        os.environ[GLOO] = interface
        if os.environ.get("LOCAL_RANK") == "0":
            logger.warning(
                "the name of this host, %r, leads to no address that others reach: %s=%s is set",
                *(socket.gethostname(), GLOO, interface),
            )


def interface_towards(host: str) -> str | None:
    """Return the name of the interface on the route to a host, None if it is not known; local."""
    return _interface_with(own_address(host))


def address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such; local."""
    if sys.platform != "linux" or name not in {known for _, known in socket.if_nameindex()}:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        answer = fcntl.ioctl(any_.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


def gloo_interface(*, one_host: bool) -> str | None:
    """Return the address or interface for Gloo, that of the links; None: it finds one by itself."""
    if os.environ.get(GLOO):
        return None
    fallback = "127.0.0.1" if one_host else own_address(os.environ.get("MASTER_ADDR"))
    return os.environ.get(BIND) or fallback


def is_address(text: str) -> bool:
    """Whether a text is an IP address, and not the name of an interface."""
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def _address_on_route(targets: Collection[tuple[int, Any]]) -> str | None:
    """Return the address of this host from which it reaches another one, unless it is loopback."""
    for family, where in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: it only looks up the route
            if not _is_loopback(address := probe.getsockname()[0]):
                return address
    return None


def _address_of_name() -> str | None:
    """Return the address of this host's name, unless it is loopback."""
    named = [where[0] for _, where in _addresses(socket.gethostname())]
    return next((address for address in named if not _is_loopback(address)), None)


def _interface_with(address: str | None) -> str | None:
    """Return the name of the interface that has an IPv4 address, None if it is not known."""
    if address is None or sys.platform != "linux":
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of_interface(name) == address), None)


def _addresses(host: str) -> list[tuple[int, Any]]:
    """Return the families and addresses of a host, IPv4 first; empty for an unknown one."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        return [(each[0], each[4]) for each in sorted(found, key=lambda each: each[0])]
    return []


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address of any kind of socket; `0.0.0.0` instead of `::ffff:0.0.0.0`."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _is_loopback(address: str) -> bool:
    try:
        return _parsed(address).is_loopback
    except ValueError:  # a name
        return address in ("lo", "localhost")


def _require_address(towards: str | None) -> str:
    """Return `own_address`, or raise `ValueError`: other hosts could reach none."""
    if (address := own_address(towards)) is None:
        name = socket.gethostname()
        found = ", ".join(sorted({where[0] for _, where in _addresses(name)})) or "no address"
        master = "MASTER_ADDR is not set" if towards is None else f"the way to {towards!r} is none"
        raise ValueError(
            f"this host has no address that other hosts can reach, as far as it knows: its name "
            f"{name!r} resolves to {found}, and {master}: {_WAY_OUT}"
        )
    return address
