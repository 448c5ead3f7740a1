"""Links between threads of one process: for tests and virtual ranks."""

import threading

import torch
from torch import Tensor

from gossipgrad.comm._transport import Lost, Received, Ticket

__all__ = ["Hub", "InProcessTransport"]


class Hub:
    """Connects the ranks of one process; each thread uses its own `hub.transport(rank)`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lock = threading.RLock()
        self.filled = [threading.Condition(self.lock) for _ in range(world_size)]
        self.boxes: list[list[Received | Lost]] = [[] for _ in range(world_size)]
        self.gone: set[int] = set()

    def transport(self, rank: int) -> "InProcessTransport":
        """The transport of one rank."""
        return InProcessTransport(self, rank)

    def remove(self, rank: int) -> None:
        """Mark a rank as gone and notify all others, once."""
        with self.lock:
            if rank in self.gone:
                return
            self.gone.add(rank)
            self.boxes[rank].clear()
            for peer in range(self.world_size):
                if peer != rank and peer not in self.gone:
                    self.boxes[peer].append(Lost(rank))
                    self.filled[peer].notify_all()


class InProcessTransport:
    """One rank's end of a `Hub`. Payloads are copied when sent, so tickets are done immediately."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub

    def open(self, peer: int) -> None:
        """Does nothing: all links of a hub are open."""

    def send(
        self,
        peer: int,
        header: bytes,
        payload: Tensor | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Copies the payload into the peer's box."""
        body = (
            None if payload is None else payload.contiguous().view(torch.uint8).to("cpu", copy=True)
        )
        with self._hub.lock:
            if not {self.rank, peer} & self._hub.gone:
                self._hub.boxes[peer].append(Received(header, body))
                self._hub.filled[peer].notify_all()
        if ticket is not None:
            ticket.done = True

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Empties this rank's box."""
        hub = self._hub
        with hub.lock:
            if not hub.boxes[self.rank] and timeout_seconds > 0:
                hub.filled[self.rank].wait(timeout_seconds)
            events, hub.boxes[self.rank] = hub.boxes[self.rank], []
            return events

    def wake(self) -> None:
        """Let `receive` return early."""
        with self._hub.lock:
            self._hub.filled[self.rank].notify_all()

    def forget(self, peer: int) -> None:
        """Does nothing: a rank that is gone has no box."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Mark this rank as gone for all others."""
        self._hub.remove(self.rank)
