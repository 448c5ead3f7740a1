"""Giving the links of a run that is over to the next one."""

from typing import Any

from torch import Tensor

from gossipgrad.comm._transport import Arrival, Lost, Sent, Ticket, Transport
from gossipgrad.comm._wire import Header, WireError

__all__ = ["Severed", "WithoutRun"]


class Severed:
    """What a channel has in place of links that it has given away: nothing goes, nothing comes."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size

    def open(self, peer: int) -> None:
        """Does nothing."""

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """Drops a message."""
        return Sent()

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """Nothing."""
        return []

    def forget(self, peer: int) -> None:
        """Does nothing."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Does nothing."""


class WithoutRun:
    """A transport less what still arrives of a run that is over, which is no stranger's."""

    def __init__(self, transport: Transport, run: bytes) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport = transport
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def open(self, peer: int) -> None:
        """As the transport does."""
        self._transport.open(peer)

    def send(self, peer: int, header: bytes, payload: Tensor | None = None) -> Ticket:
        """As the transport does."""
        return self._transport.send(peer, header, payload)

    def receive(self, timeout_seconds: float) -> list[Arrival | Lost]:
        """What has come, of other runs and of strangers too."""
        events = self._transport.receive(timeout_seconds)
        return [e for e in events if isinstance(e, Lost) or _run_of(e) != self._run]

    def forget(self, peer: int) -> None:
        """As the transport does."""
        self._transport.forget(peer)

    def close(self, linger_seconds: float = 0.0) -> None:
        """As the transport does."""
        self._transport.close(linger_seconds)


def _run_of(arrival: Arrival) -> bytes | None:
    try:
        return Header.unpack(arrival.header).run
    except WireError:
        return None
