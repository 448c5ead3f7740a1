"""Optimizer state on the device, in host memory and on disk, each within its budget."""

import contextlib
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossipgrad.errors import GossipError

__all__ = ["Store", "StoreStats", "Tiers"]


@dataclass(frozen=True)
class Tiers:
    """The storage tiers of an optimizer's state, and their budgets in bytes.

    Tensors stay on the device while they fit; those needed last move to the host, and from there to
    disk. If the device is the CPU, device and host are the same memory: the budget is their sum,
    and without `host_bytes` anything beyond `device_bytes` goes to disk directly, if there is one.

    The disk tier is one file that has no name: it is in the folder's file system, `df` and `lsof`
    show it, and the kernel frees it when the process ends in any way. It holds working state, not a
    checkpoint.

    Args:
        device_bytes: Budget on the device; None: no limit.
        host_bytes: Budget in (pinned) host memory; None: no limit.
        disk: Folder on a local disk, created if missing; None: no disk tier.

    Raises:
        ValueError: For a budget below 0, or lower tiers without a limit on the device.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_whole and value >= 0):
                raise ValueError(
                    f"{name} must be a whole number of bytes, at least 0, or None for no limit, "
                    f"got {value!r}"
                )
        if self.device_bytes is None and (self.host_bytes is not None or self.disk is not None):
            raise ValueError(
                "host_bytes and disk have no effect without device_bytes: state leaves the device "
                "only where that is limited. Give device_bytes, or leave the others out"
            )


@dataclass(slots=True)
class StoreStats:
    """The sizes and counters of a store.

    Attributes:
        device_bytes: Bytes on the device now.
        host_bytes: Bytes in host memory now.
        disk_bytes: Bytes in the file.
        highest_device_bytes: The most bytes on the device at a time.
        highest_host_bytes: The most bytes in host memory at a time.
        loads: How often `use` had to fetch a tensor from a lower tier itself.
        prefetched: How often the prefetching thread had done so already.
        evictions: How often a tensor was moved to a lower tier.
        written_bytes: Bytes written to disk.
        read_bytes: Bytes read from disk.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    highest_device_bytes: int = 0
    highest_host_bytes: int = 0
    loads: int = 0
    prefetched: int = 0
    evictions: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


_DEVICE, _HOST, _DISK = range(3)


@dataclass(slots=True, eq=False)
class _Entry:
    """One tensor. `tensor` is None on disk; `is_dirty`: the copy on disk, if any, is old."""

    shape: torch.Size
    dtype: torch.dtype
    size: int
    tier: int = _DEVICE
    tensor: Tensor | None = None
    slot: int | None = None
    is_dirty: bool = True
    pins: int = 0
    last: int = -1
    period: int | None = None

    def next_use(self, now: int) -> int:
        """The expected time of its next use: a period after the last one."""
        # An overdue entry is expected after another such time. One used once is expected last: in
        # the first pass over the keys the newest one is needed last.
        if self.period is None:
            return _FAR + self.last
        if self.last + self.period > now:
            return self.last + self.period
        return 2 * now - self.last


_FAR = 1 << 60


class Store:
    """Tensors by key, as many on the device as its budget allows.

    Without limits and disk it only holds the tensors: no copies, no thread. One thread calls it; a
    background thread prefetches.

    Args:
        tiers: Budgets; None: no limits.
        device: Device of the tensors that `use` yields.

    Raises:
        RuntimeError: The folder of the disk tier cannot be made or written to.

    Example:
        >>> import torch
        >>> from gossipgrad.second_order import Store, Tiers
        >>> store = Store(Tiers(device_bytes=8, host_bytes=400), torch.device("cpu"))
        >>> store.put("a", torch.ones(2)); store.put("b", torch.zeros(2))
        >>> with store.use(["a"]) as (a,):
        ...     a.mul_(3.0)
        tensor([3., 3.])
        >>> store.stats.device_bytes, store.stats.host_bytes
        (8, 8)
        >>> store.close()
    """

    def __init__(self, tiers: Tiers | None, device: torch.device) -> None:
        tiers = tiers or Tiers()
        self.tiers = tiers
        self.device = device
        self.stats = StoreStats()
        self._entries: dict[Hashable, _Entry] = {}
        host = tiers.host_bytes
        if device.type == "cpu" and host is None and tiers.disk is not None:
            host = 0
        self._budgets = (tiers.device_bytes, host)
        self._resident = [0, 0]
        self._clock = 0
        self._after: dict[Hashable, Sequence[Hashable]] = {}
        self._before: Hashable = None
        self._lock = threading.RLock()
        self._file = None if tiers.disk is None else _File(Path(tiers.disk))
        self._hints: queue.SimpleQueue[Sequence[Hashable] | None] = queue.SimpleQueue()
        self._is_tiered = any(budget is not None for budget in self._budgets)
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _end, self._hints, self._file)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def check(self, working_set_bytes: int) -> None:
        """Check in advance whether so many bytes can be in use at a time.

        Raises:
            ValueError: They cannot.
        """
        budget = self._budgets[_DEVICE]
        if budget is not None and working_set_bytes > budget:
            raise ValueError(
                f"device_bytes={budget} is less than the {working_set_bytes} bytes that are used "
                f"together: give Tiers(device_bytes={working_set_bytes}) or more, or make blocks "
                "smaller"
            )

    def put(self, key: Hashable, tensor: Tensor) -> None:
        """Store a tensor of the store's device, without a copy if it is contiguous.

        Replacing a tensor of the same shape on the device, as inside `use`, cannot fail.

        Raises:
            ValueError: It is larger than the budget of the device.
            RuntimeError: No tier has room for it, or the disk is full. The store is as it was.
        """
        tensor = tensor.contiguous()
        size = tensor.numel() * tensor.element_size()
        self.check(size)
        with self._lock:
            old = self._entries.get(key)
            if old is not None and old.tier == _DEVICE and _is_like(old, tensor):
                old.tensor, old.is_dirty = tensor, True
                return
            if old is not None and old.pins:
                raise RuntimeError(f"{key!r} is in use and cannot be replaced")
            if old is not None:
                old.pins += 1  # must not be moved to make room
            try:
                freed = old.size if old is not None and old.tier == _DEVICE else 0
                self._make_room(_DEVICE, size - freed)
            finally:
                if old is not None:
                    old.pins -= 1
            entry = _Entry(tensor.shape, tensor.dtype, size, tensor=tensor)
            if old is not None:
                self._count(old.tier, -old.size)
                entry.last, entry.period = old.last, old.period
                if old.slot is not None and self._file is not None:
                    if old.size == size:
                        entry.slot = old.slot
                    else:
                        self._file.free(old.slot, old.size)
            self._entries[key] = entry
            self._count(_DEVICE, size)

    @contextmanager
    def use(self, keys: Sequence[Hashable], *, is_written: bool = True) -> Iterator[list[Tensor]]:
        """Yield the tensors of keys on the device, where they stay inside the block.

        They may be modified in place inside, and must not be used after it.

        Args:
            keys: The keys; tensors that are used together must fit the device's budget.
            is_written: False: they are not modified, so copies on disk stay valid.

        Raises:
            KeyError: A key does not exist.
            ValueError: Together they are larger than the budget.
            RuntimeError: The disk is full or cannot be read; tensors in memory are unchanged.
        """
        if not self._is_tiered:
            yield [self._held(key) for key in keys]
            return
        entries = [self._entries[key] for key in dict.fromkeys(keys)]
        with self._lock:
            self.check(sum(each.size for each in entries))
            for entry in entries:
                entry.pins += 1
            try:
                self._note(keys)
                for entry in entries:
                    self.stats.loads += self._load(entry)
                tensors = [self._held(key) for key in keys]
            except BaseException:
                for entry in entries:
                    entry.pins -= 1
                raise
        if keys and (ahead := self._after.get(keys[0])):
            self.prefetch(ahead)
        try:
            yield tensors
        finally:
            with self._lock:
                for entry in entries:
                    entry.pins -= 1
                    entry.is_dirty |= is_written

    def prefetch(self, keys: Sequence[Hashable]) -> None:
        """Load keys in a thread, as far as they fit without evicting earlier ones."""
        if not self._is_tiered or not self._finalizer.alive:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_prefetch,
                args=(weakref.ref(self), self._hints),
                name="gossipgrad-prefetch",
                daemon=True,
            )
            self._thread.start()
        self._hints.put(tuple(keys))

    def close(self) -> None:
        """End the thread and free the file. May be called twice.

        Without a disk tier tensors stay; with one all are lost.
        """
        self._finalizer()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        if self._file is not None:
            self._entries.clear()
            self._resident = [0, 0]

    def _held(self, key: Hashable) -> Tensor:
        tensor = self._entries[key].tensor
        assert tensor is not None
        return tensor

    def _note(self, keys: Sequence[Hashable]) -> None:
        """Record the time and order of key uses, for the forecast."""
        self._clock += 1
        for key in keys:
            entry = self._entries[key]
            if entry.last >= 0 and self._clock > entry.last:
                entry.period = self._clock - entry.last
            entry.last = self._clock
        if keys:
            self._after[self._before] = tuple(keys)
            self._before = keys[0]

    def _load(self, entry: _Entry) -> bool:
        """Move a tensor to the device; return whether it had to be moved."""
        if entry.tier == _DEVICE:
            return False
        tier = entry.tier
        self._count(tier, -entry.size)  # another tensor may need its space in the lower tier
        try:
            self._make_room(_DEVICE, entry.size)
            if entry.tensor is None:
                assert self._file is not None
                assert entry.slot is not None
                host = torch.empty(entry.shape, dtype=entry.dtype)
                self._file.read(entry.slot, host)
                self.stats.read_bytes += entry.size
                entry.tensor, entry.is_dirty = host.to(self.device), False
            else:
                entry.tensor = entry.tensor.to(self.device)
        except BaseException:
            self._count(tier, entry.size)
            raise
        entry.tier = _DEVICE
        self._count(_DEVICE, entry.size)
        return True

    def _make_room(self, tier: int, size: int, before: int | None = None) -> None:
        """Move tensors that are needed last to a lower tier, until so many bytes fit."""
        budget = self._budgets[tier]
        if budget is None:
            return
        excess = self._resident[tier] + size - budget
        if excess <= 0:
            return
        candidates = sorted(
            (each for each in self._entries.values() if each.tier == tier and not each.pins),
            key=lambda each: each.next_use(self._clock),
            reverse=True,
        )
        for entry in candidates:
            if excess <= 0 or (before is not None and entry.next_use(self._clock) <= before):
                break
            self._evict(entry)
            excess -= entry.size
        if excess > 0:
            raise _NoRoomError(self._no_room(tier, excess))

    def _evict(self, entry: _Entry) -> None:
        assert entry.tensor is not None
        if entry.tier == _DEVICE and self._has_room_on_host(entry.size):
            tensor = entry.tensor
            if self.device.type != "cpu":
                tensor = torch.empty(entry.shape, dtype=entry.dtype, pin_memory=True)
                tensor.copy_(entry.tensor)
            self._count(_DEVICE, -entry.size)
            entry.tensor, entry.tier = tensor, _HOST
            self._count(_HOST, entry.size)
        else:
            if self._file is None:
                raise _NoRoomError(self._no_room(entry.tier, entry.size))
            if entry.is_dirty or entry.slot is None:
                if entry.slot is None:
                    entry.slot = self._file.reserve(entry.size)
                self._file.write(entry.slot, entry.tensor.cpu())
                self.stats.written_bytes += entry.size
                entry.is_dirty = False
            self._count(entry.tier, -entry.size)
            entry.tensor, entry.tier = None, _DISK
            self._count(_DISK, entry.size)
        self.stats.evictions += 1

    def _has_room_on_host(self, size: int) -> bool:
        """Make room for so many bytes; return False if impossible, so that they go to disk."""
        try:
            self._make_room(_HOST, size)
        except _NoRoomError:
            if self._file is None:
                raise
            return False
        return True

    def _count(self, tier: int, size: int) -> None:
        stats = self.stats
        if tier == _DISK:
            stats.disk_bytes += size
            return
        self._resident[tier] += size
        stats.device_bytes, stats.host_bytes = self._resident
        stats.highest_device_bytes = max(stats.highest_device_bytes, stats.device_bytes)
        stats.highest_host_bytes = max(stats.highest_host_bytes, stats.host_bytes)

    def _no_room(self, tier: int, size: int) -> str:
        name = ("device_bytes", "host_bytes")[tier]
        total = sum(each.size for each in self._entries.values())
        return (
            f"{name}={self._budgets[tier]} is {size} bytes too few, and no lower tier takes them: "
            f"the state has {total} bytes so far. Raise the budgets, or give Tiers(disk=...)"
        )

    def _load_ahead(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None or entry.tier == _DEVICE:
                    continue
                entry.pins += 1
                try:
                    self._make_room(_DEVICE, entry.size, entry.next_use(self._clock))
                    self.stats.prefetched += self._load(entry)
                finally:
                    entry.pins -= 1


_CLOSE_SECONDS = 10.0


def _is_like(entry: _Entry, tensor: Tensor) -> bool:
    return (entry.shape, entry.dtype) == (tensor.shape, tensor.dtype)


class _NoRoomError(GossipError):
    """A tier is full."""


def _prefetch(reference: "weakref.ref[Store]", hints: "queue.SimpleQueue[Any]") -> None:
    while (keys := hints.get()) is not None:
        store = reference()
        if store is None:
            return
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            store._load_ahead(keys)  # `use` meets the same error and raises it
        del store


def _end(hints: "queue.SimpleQueue[Any]", file: "_File | None") -> None:
    hints.put(None)
    if file is not None:
        file.close()


class _File:
    """Slots in an unnamed file, read and written by position."""

    # Not mapped into memory: a full or failing disk then raises an error instead of SIGBUS.

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[int]] = {}
        self._end = 0
        with self._named("made"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115

    def reserve(self, size: int) -> int:
        """Allocate a slot of so many bytes on disk."""
        if self._free.get(size):
            return self._free[size].pop()
        with self._named("enlarged"):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._end, max(size, 1))
        slot, self._end = self._end, self._end + size
        return slot

    def free(self, slot: int, size: int) -> None:
        self._free.setdefault(size, []).append(slot)

    def write(self, slot: int, tensor: Tensor) -> None:
        view = _bytes_of(tensor)
        with self._named("written"):
            done = 0
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], slot + done)

    def read(self, slot: int, tensor: Tensor) -> None:
        view = _bytes_of(tensor)
        with self._named("read"):
            done = 0
            while done < len(view):
                count = os.preadv(self._file.fileno(), [view[done:]], slot + done)
                if count == 0:
                    raise OSError("the file is shorter than what was written to it")
                done += count

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise GossipError(
                f"the disk tier in {self._folder} could not be {what}: {error}. State in memory "
                "is intact: make room there or name another folder, Tiers(disk=...), and resume"
            ) from error


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
