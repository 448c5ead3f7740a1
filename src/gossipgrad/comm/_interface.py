"""Which network interface a rank listens on."""

import socket

from gossipgrad.comm._group import Group

__all__ = ["bind_address"]


def bind_address(group: Group) -> str:
    """Loopback if all ranks are on one host, else the address this host's name resolves to.

    A collective over `group`.

    Raises:
        ValueError: If the ranks are on several hosts and this one's name leads to loopback, where
            no other host could reach it.
    """
    name = socket.gethostname()
    if len(set(group.all_gather_object(name))) == 1:
        return "127.0.0.1"
    address = socket.gethostbyname(name)
    if address.startswith("127."):
        raise ValueError(
            f"this host's name {name!r} resolves to the loopback address {address}, which other "
            "hosts cannot reach: name the interface with transport=gg.ZeroMQ(bind='10.0.0.7')"
        )
    return address
