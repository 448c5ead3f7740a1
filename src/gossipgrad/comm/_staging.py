"""Snapshots of the payload, sent while training continues, and staging of received parts."""

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossipgrad.comm._buckets import BucketPlan
from gossipgrad.comm._shared_memory import Arena
from gossipgrad.comm._transport import Ticket

__all__ = ["Snapshot", "SnapshotPool", "stage"]

_LARGEST_FP16 = torch.finfo(torch.float16).max


class _Copy:
    """A copy of one bucket, of the wire type, in host memory.

    On CUDA it is made on the step's stream, and a side stream copies it to pinned host memory.
    """

    def __init__(self, plan: BucketPlan, bucket: int, device: torch.device, flat: Tensor) -> None:
        self._layout = plan.buckets[bucket]
        specs = [plan.specs[index] for index in self._layout.indices]
        self.flat = flat
        pieces = self.flat.split([spec.numel for spec in specs])
        self._views = [piece.view(spec.shape) for piece, spec in zip(pieces, specs, strict=True)]
        self._device = device
        self._host: Tensor | None = None
        if device.type == "cuda":
            self._host = torch.empty_like(self.flat, device="cpu").pin_memory()
        self.tickets: list[Ticket] = []  # of the transports that read it
        self.holder: Snapshot | None = None

    @property
    def size_bytes(self) -> int:
        """Memory on the device and on the host."""
        return self.flat.nbytes + (0 if self._host is None else self._host.nbytes)

    @property
    def is_free(self) -> bool:
        """Whether no snapshot holds it, and no transport reads it any more."""
        while self.tickets and self.tickets[0].done:
            self.tickets.pop(0)
        return self.holder is None and not self.tickets

    def take(
        self, tensors: Sequence[Tensor | None], stream: "torch.cuda.Stream | None"
    ) -> tuple[Tensor, Callable[[], bool] | None]:
        """See `Snapshot.take`."""
        flat, pairs = self.flat, list(zip(self._views, tensors, strict=True))
        if missing := [view for view, tensor in pairs if tensor is None]:
            torch._foreach_zero_(missing)
        there = [(view, tensor) for view, tensor in pairs if tensor is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        if flat.dtype == torch.float16 and self._layout.dtype != torch.float16:
            flat.clamp_(-_LARGEST_FP16, _LARGEST_FP16)
        if self._host is None or stream is None:
            return flat.cpu(), None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
            return self._host, stream.record_event().query


class Snapshot:
    """A copy of all buckets at one moment; it holds a bucket from `take` to `drop`."""

    def __init__(self, pool: "SnapshotPool") -> None:
        self._pool = pool

    def _held(self, bucket: int) -> _Copy | None:
        # A copy's holder is the only mark of its owner, so an interrupt loses none.
        for copy in self._pool.copies[bucket]:
            if copy.holder is self:
                return copy
        return None

    def flat(self, bucket: int) -> Tensor:
        """Return the copy of a bucket: flat, of the wire type, on the tensors' device."""
        copy = self._held(bucket)
        assert copy is not None, f"bucket {bucket} is not held"
        return copy.flat

    @torch.no_grad()
    def take(
        self, bucket: int, tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor, Callable[[], bool] | None]:
        """Copy a bucket's tensors, casting to the wire type; None counts as zeros.

        Values beyond fp16's range become its largest value: both ends subtract the values they
        sent, so this only slows the averaging and creates no infinity.

        Returns:
            The values to send, in host memory, and a function that returns whether they are there
            already; None if they are.
        """
        copy = self._held(bucket) or self._pool.free_copy(bucket)
        copy.holder = self
        return copy.take(tensors, self._pool.stream)

    def hold(self, bucket: int, ticket: Ticket) -> None:
        """Keep a bucket from being overwritten before `ticket` is done."""
        if (copy := self._held(bucket)) is not None:
            copy.tickets.append(ticket)

    def drop(self, bucket: int) -> None:
        """Return a bucket's copy, which is not read any more; another snapshot may use it."""
        if (copy := self._held(bucket)) is not None:
            copy.holder = None

    def release(self) -> None:
        """Return the snapshot and all its copies to the pool."""
        for bucket in range(len(self._pool.copies)):
            self.drop(bucket)
        self._pool.taken.discard(self)


class SnapshotPool:
    """At most `limit` snapshots, with copies of buckets that are made when needed, and reused.

    A step that mixes a bucket and then copies it for the next round needs one copy of each: the
    next snapshot gets the memory of the one before it, bucket by bucket.

    Attributes:
        copies: The copies of each bucket that were made so far.
        taken: The snapshots in use.
        stream: Copies to host memory; None but for CUDA.
    """

    def __init__(self, plan: BucketPlan, device: torch.device, limit: int) -> None:
        self._plan, self._parts = plan, plan.parts
        self._device = device
        self._limit = limit
        self.taken: set[Snapshot] = set()
        self.copies: list[list[_Copy]] = [[] for _ in plan.buckets]
        self._spare: dict[int, list[Tensor]] = {}  # memory for received parts, by bucket
        self._lock = threading.Lock()
        self._wide: list[Tensor] = []  # memory for deltas that are wider than their parts
        is_on_host = device.type == "cpu"
        sizes_bytes = [part.size_bytes for part in plan.parts for _ in range(limit)]
        self._arena = Arena(sizes_bytes) if is_on_host else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def size_bytes(self) -> int:
        """Memory of all copies made so far."""
        return sum(copy.size_bytes for copies in self.copies for copy in copies)

    @property
    def spare_bytes(self) -> int:
        """Memory kept for parts that will be received."""
        spare = [memory for each in [*self._spare.values()] for memory in [*each]]
        return sum(memory.nbytes for memory in [*spare, *self._wide])

    @property
    def limit_bytes(self) -> int:
        """The upper limit of `size_bytes`: memory of all copies."""
        sides = 2 if self._device.type == "cuda" else 1
        return self._limit * self._plan.size_bytes * sides

    def acquire(self, wait: Callable[[], None], timeout_seconds: float) -> Snapshot | None:
        """Return a snapshot whose buckets can be taken, or None if there is none in time.

        Waits only for transports: if the owner uses every snapshot, returns None.

        Args:
            wait: Called while waiting, to let the channel make progress.
            timeout_seconds: How long to wait for a transport to release it.
        """
        deadline = time.perf_counter() + timeout_seconds
        while len(self.taken) < self._limit:
            for copies in self.copies:
                if len(copies) >= self._limit and not any(copy.is_free for copy in copies):
                    break
            else:
                snapshot = Snapshot(self)
                self.taken.add(snapshot)
                return snapshot
            if time.perf_counter() > deadline:
                break
            wait()
        return None

    def free_copy(self, bucket: int) -> _Copy:
        """Return a copy of a bucket that nothing reads, a new one if there is none."""
        for copy in self.copies[bucket]:
            if copy.is_free:
                return copy
        numel, dtype = self._parts[bucket].numel, self._parts[bucket].dtype
        if self._arena is not None:
            flat = self._arena.empty(numel, dtype)
        else:
            flat = torch.empty(numel, dtype=dtype, device=self._device)
        self.copies[bucket].append(_Copy(self._plan, bucket, self._device, flat))
        return self.copies[bucket][-1]

    def lend(self, bucket: int) -> Tensor:
        """Return memory in which a part of a bucket may be received; in host memory."""
        spare, part = self._spare.get(bucket), self._parts[bucket]
        return spare.pop() if spare else torch.empty(part.numel, dtype=part.dtype, device="cpu")

    def keep(self, bucket: int, memory: Tensor) -> None:
        """Keep memory that nothing reads or writes any more for a later part."""
        self._spare.setdefault(bucket, []).append(memory)

    def lend_wide(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the delta of any bucket, of a wider type; on the tensors' device.

        New memory for each delta would cost as much time as the arithmetic.
        """
        with self._lock:  # a thread of an island computes deltas, too
            for index, memory in enumerate(self._wide):
                if memory.dtype == dtype:
                    return self._wide.pop(index)
        largest = max(part.numel for part in self._parts)
        return torch.empty(largest, dtype=dtype, device=self._device)

    def keep_wide(self, memory: Tensor) -> None:
        """Keep the result of `lend_wide` for a later delta."""
        self._wide.append(memory)


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
