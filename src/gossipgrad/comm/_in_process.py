"""Links between threads of one process: for tests and virtual ranks."""

import threading
from collections import deque

import torch
from torch import Tensor

from gossipgrad.comm._transport import Lost, Received, Ticket

__all__ = ["Hub", "InProcessTransport"]


class Hub:
    """Connects the ranks of one process; each thread uses its own `hub.transport(rank)`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.RLock()
        self._filled = [threading.Condition(self._lock) for _ in range(world_size)]
        self._boxes: list[deque[Received | Lost]] = [deque() for _ in range(world_size)]
        self._gone: set[int] = set()

    def transport(self, rank: int) -> "InProcessTransport":
        """The transport of one rank."""
        return InProcessTransport(self, rank)

    def put(self, sender: int, peer: int, event: Received) -> None:
        """Put a message into a rank's box; drop it if either rank is gone."""
        with self._lock:
            if not {sender, peer} & self._gone:
                self._boxes[peer].append(event)
                self._filled[peer].notify_all()

    def get(self, rank: int, timeout_seconds: float) -> list[Received | Lost]:
        """Empty a rank's box; wait for the first message at most `timeout_seconds`."""
        with self._lock:
            if not self._boxes[rank] and timeout_seconds > 0:
                self._filled[rank].wait(timeout_seconds)
            events = list(self._boxes[rank])
            self._boxes[rank].clear()
            return events

    def wake(self, rank: int) -> None:
        """Let a rank's `get` return early."""
        with self._lock:
            self._filled[rank].notify_all()

    def remove(self, rank: int) -> None:
        """Mark a rank as gone and notify all others, once."""
        with self._lock:
            if rank in self._gone:
                return
            self._gone.add(rank)
            self._boxes[rank].clear()
            for peer in range(self.world_size):
                if peer != rank and peer not in self._gone:
                    self._boxes[peer].append(Lost(rank))
                    self._filled[peer].notify_all()


class InProcessTransport:
    """One rank's end of a `Hub`. Payloads are copied when sent, so tickets are done immediately."""

    reopens = True

    def __init__(self, hub: Hub, rank: int) -> None:
        if not 0 <= rank < hub.world_size:
            raise ValueError(f"rank must lie in 0..{hub.world_size - 1}, got {rank}")
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
        self._hub.put(self.rank, peer, Received(header, body))
        if ticket is not None:
            ticket.done = True

    def receive(self, timeout_seconds: float) -> list[Received | Lost]:
        """Empties this rank's box."""
        return self._hub.get(self.rank, timeout_seconds)

    def wake(self) -> None:
        """Let `receive` return early."""
        self._hub.wake(self.rank)

    def forget(self, peer: int) -> None:
        """Does nothing: a rank that is gone has no box."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Mark this rank as gone for all others."""
        self._hub.remove(self.rank)
