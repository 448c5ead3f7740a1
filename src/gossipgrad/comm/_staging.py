"""Snapshots: copies of the payload that may travel while training goes on."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossipgrad.comm._buckets import BucketPlan, FlatBuffers
from gossipgrad.comm._transport import Ticket

__all__ = ["Snapshot", "SnapshotPool", "to_device"]


class Snapshot:
    """A copy of all buckets at one moment; of the wire type, in host memory where it is sent from.

    On an accelerator the copy is made there, on the stream of the training step, and brought to
    pinned host memory on a side stream, so that the step never waits for the transfer.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self.buffers = FlatBuffers(plan, device)
        self._device = device
        self._hosts: list[Tensor] | None = None
        if device.type == "cuda":
            self._hosts = [torch.empty_like(f, device="cpu").pin_memory() for f in self.flats]
            self._stream = torch.cuda.Stream(device)
        self._tickets: list[Ticket] = []

    @property
    def flats(self) -> list[Tensor]:
        """One flat tensor a bucket, where the parameters are."""
        return self.buffers.flats

    @property
    def size_bytes(self) -> int:
        """Memory held, on both sides."""
        return self.buffers.size_bytes * (1 if self._hosts is None else 2)

    @property
    def free(self) -> bool:
        """Whether every transport has let go of it."""
        return all(ticket.done for ticket in self._tickets)

    def take(
        self, bucket: int, tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Copies a bucket's tensors; returns what to send, and what to wait for before."""
        self.buffers.fill(bucket, tensors)
        return self._ready(bucket)

    def hold(self, ticket: Ticket) -> None:
        """Keeps the snapshot from being written again before `ticket` is done."""
        self._tickets = [held for held in self._tickets if not held.done]
        self._tickets.append(ticket)

    def _ready(self, bucket: int) -> tuple[Tensor, Callable[[], None] | None]:
        if self._hosts is None:
            return self.flats[bucket], None
        return self._bring(bucket, self._hosts[bucket])

    def _bring(self, bucket: int, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(self.flats[bucket], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return host, event.synchronize


class SnapshotPool:
    """At most `limit` snapshots, made when first needed and used in turn."""

    def __init__(self, plan: BucketPlan, device: torch.device, limit: int) -> None:
        self._plan = plan
        self._device = device
        self._limit = limit
        self._all: list[Snapshot] = []
        self._used: set[int] = set()

    @property
    def size_bytes(self) -> int:
        """Memory of all snapshots made so far."""
        return sum(snapshot.size_bytes for snapshot in self._all)

    @property
    def limit_bytes(self) -> int:
        """The most that `size_bytes` may come to."""
        sides = 2 if self._device.type == "cuda" else 1
        return self._limit * self._plan.size_bytes * sides

    def acquire(self, wait: Callable[[], None], timeout_seconds: float) -> Snapshot | None:
        """A snapshot that nobody reads any more; None if there is none in time.

        It waits only for transports: with every snapshot in use by its owner there is none.

        Args:
            wait: Called while waiting, to let the channel make progress.
            timeout_seconds: How long to wait for a transport to let go.
        """
        deadline = time.perf_counter() + timeout_seconds
        while True:
            for snapshot in self._all:
                if id(snapshot) not in self._used and snapshot.free:
                    self._used.add(id(snapshot))
                    return snapshot
            if len(self._all) < self._limit:
                self._all.append(Snapshot(self._plan, self._device))
            elif len(self._used) == self._limit or time.perf_counter() > deadline:
                return None
            else:
                wait()

    def release(self, snapshot: Snapshot) -> None:
        """Gives a snapshot back; it is used again once its tickets are done."""
        self._used.discard(id(snapshot))


def to_device(received: Tensor, like: Tensor) -> Tensor:
    """What was received, where `like` is; through pinned memory and a side stream on CUDA."""
    if like.device.type != "cuda":
        return received.to(like.device)
    stream = torch.cuda.Stream(like.device)
    with torch.cuda.stream(stream):
        moved = received.pin_memory().to(like.device, non_blocking=True)
    current = torch.cuda.current_stream(like.device)
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved
