"""Which transport carries the links: one by name, or the user's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossipgrad.comm._access import check_encrypt
from gossipgrad.comm._faults import Faults, FaultyTransport
from gossipgrad.comm._group import Group
from gossipgrad.comm._transport import Transport
from gossipgrad.comm._zeromq import ZeroMQTransport

__all__ = ["FaultyLinks", "resolve_transport"]


@dataclass(frozen=True, slots=True)
class FaultyLinks:
    """Links over ZeroMQ to which faults happen by script; they foresee what the plan does.

    Attributes:
        faults: The script.
        encrypt: As that of `ZeroMQTransport`.
    """

    faults: Faults
    encrypt: bool | None = None

    def __call__(self, group: Group, largest_bytes: int = 1 << 32) -> Transport:
        """The transport of this rank; a collective."""
        links = ZeroMQTransport(group, max_payload_bytes=largest_bytes, encrypt=self.encrypt)
        return FaultyTransport(links, self.faults)


def resolve_transport(transport: Any, *, encrypt: Any = None) -> Callable[[Group, int], Transport]:
    """How links are made, of a group and the largest payload in bytes that the plan foresees.

    Args:
        transport: `"zeromq"`, `FaultyLinks`, or a function from a group to a transport,
            which has a limit of its own.
        encrypt: Whether links are encrypted, which `"zeromq"` can; None: if there is a secret.

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
    if encrypt and transport != "zeromq":
        raise ValueError(
            "encrypt=True is for transport='zeromq'; in a function of your own write "
            "lambda group: ZeroMQTransport(group, encrypt=True)"
        )
    if transport == "zeromq":
        return lambda group, largest_bytes: ZeroMQTransport(
            group, max_payload_bytes=largest_bytes, encrypt=encrypt
        )
    if isinstance(transport, FaultyLinks):
        return transport
    return lambda group, largest_bytes: transport(group)
