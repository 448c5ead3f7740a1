"""Snapshots of the payload, sent while training continues, and staging of received parts."""

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossipgrad.comm._buckets import BucketPlan
from gossipgrad.comm._transport import Ticket

__all__ = ["Snapshot", "SnapshotPool", "stage"]

_LARGEST_FP16 = torch.finfo(torch.float16).max


class Snapshot:
    """A copy of all buckets at one moment, of the wire type, in host memory.

    On an accelerator the copy is first made there, on the stream of the training step. On CUDA a
    side stream then copies it to pinned host memory, so that the step never waits for the transfer.
    On other accelerators it is copied to host memory immediately.

    Attributes:
        flats: One flat tensor a bucket, of the wire type, shape `(numel,)`, on the tensors' device.
        views: For each bucket one view a tensor, in the order of `BucketLayout.indices`.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self.flats = [torch.zeros(p.numel, dtype=p.dtype, device=device) for p in plan.parts]
        self.views = [
            [
                piece.view(plan.specs[index].shape)
                for piece, index in zip(
                    flat.split([plan.specs[index].numel for index in layout.indices]),
                    layout.indices,
                    strict=True,
                )
            ]
            for flat, layout in zip(self.flats, plan.buckets, strict=True)
        ]
        self._plan, self._device = plan, device
        self._hosts: list[Tensor] = []
        if device.type == "cuda":
            self._hosts = [torch.empty_like(f, device="cpu").pin_memory() for f in self.flats]
            self._stream = torch.cuda.Stream(device)
        self._tickets: deque[Ticket] = deque()

    @property
    def size_bytes(self) -> int:
        """Memory on the device and on the host."""
        return sum(flat.nbytes for flat in (*self.flats, *self._hosts))

    @property
    def free(self) -> bool:
        """Whether every transport has released it."""
        while self._tickets and self._tickets[0].done:
            self._tickets.popleft()
        return not self._tickets

    @torch.no_grad()
    def take(
        self, bucket: int, tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Copy a bucket's tensors, casting to the wire type; None counts as zeros.

        Values beyond fp16's range become its largest value: both ends subtract the values they
        sent, so this only slows the averaging and creates no infinity.

        Returns:
            The values to send, in host memory, and a function to wait for before sending.
        """
        flat = self.flats[bucket]
        pairs = list(zip(self.views[bucket], tensors, strict=True))
        if missing := [view for view, tensor in pairs if tensor is None]:
            torch._foreach_zero_(missing)
        there = [(view, tensor) for view, tensor in pairs if tensor is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        if flat.dtype == torch.float16 and self._plan.buckets[bucket].dtype != torch.float16:
            flat.clamp_(-_LARGEST_FP16, _LARGEST_FP16)
        if not self._hosts:
            return flat.cpu(), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._hosts[bucket].copy_(flat, non_blocking=True)
            return self._hosts[bucket], self._stream.record_event().synchronize

    def hold(self, ticket: Ticket) -> None:
        """Keep the snapshot from being overwritten before `ticket` is done."""
        if not ticket.done:
            self._tickets.append(ticket)


class SnapshotPool:
    """At most `limit` snapshots, created when first needed and reused."""

    def __init__(self, plan: BucketPlan, device: torch.device, limit: int) -> None:
        self._plan = plan
        self._device = device
        self._limit = limit
        self._all: list[Snapshot] = []
        self._used: set[int] = set()
        self._spare: dict[int, list[Tensor]] = {}  # memory for received parts, by bucket

    @property
    def size_bytes(self) -> int:
        """Memory of all snapshots made so far."""
        return sum(snapshot.size_bytes for snapshot in self._all)

    @property
    def spare_bytes(self) -> int:
        """Memory kept for parts that will be received."""
        return sum(memory.nbytes for spare in [*self._spare.values()] for memory in [*spare])

    @property
    def limit_bytes(self) -> int:
        """The upper limit of `size_bytes`."""
        sides = 2 if self._device.type == "cuda" else 1
        return self._limit * self._plan.size_bytes * sides

    def acquire(self, wait: Callable[[], None], timeout_seconds: float) -> Snapshot | None:
        """Return a free snapshot, or None if there is none in time.

        Waits only for transports: if the owner uses every snapshot, returns None.

        Args:
            wait: Called while waiting, to let the channel make progress.
            timeout_seconds: How long to wait for a transport to release it.
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

    def lend(self, bucket: int) -> Tensor:
        """Return memory in which a part of a bucket may be received; in host memory."""
        spare, part = self._spare.get(bucket), self._plan.parts[bucket]
        return spare.pop() if spare else torch.empty(part.numel, dtype=part.dtype, device="cpu")

    def give_back(self, bucket: int, memory: Tensor) -> None:
        """Take back memory that nothing reads or writes any more."""
        self._spare.setdefault(bucket, []).append(memory)

    def release(self, snapshot: Snapshot) -> None:
        """Return a snapshot to the pool; it is reused after its tickets are done."""
        self._used.discard(id(snapshot))


def stage(received: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Start copying a received part to a device; from any thread.

    On CUDA it is pinned, and copied on a side stream: a background thread does both while the step
    computes.

    Returns:
        A function that returns it on the device; call it in the thread that uses it, whose stream
        then waits for the copy.
    """
    if device.type != "cuda":
        moved = received.to(device)
        return lambda: moved
    stream = _inbound(device)
    with torch.cuda.stream(stream):
        moved = received.pin_memory().to(device, non_blocking=True)
        copied = stream.record_event()

    def arrive() -> Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        moved.record_stream(current)
        return moved

    return arrive


@functools.cache
def _inbound(device: torch.device) -> torch.cuda.Stream:
    """Return the one shared stream: memory of a stream is reused on that stream only."""
    return torch.cuda.Stream(device)
