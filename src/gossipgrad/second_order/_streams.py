"""Work beside training on a device, and counts that are read from it without waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["LateCount", "SideStream", "to_host"]


class SideStream:
    """A stream of one CUDA device, of the lowest priority; elsewhere work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Enqueue what is called inside after all that the current stream has so far."""
        # Memory that is allocated here needs no `record_stream`. 1. What a job allocates is read by
        # the current stream after `wait(mark)`. 2. When it is freed, only a later job can get it.
        # 3. That job starts behind the current stream, so behind the reads.
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, *tensors: Tensor) -> None:
        """Keep memory of the current stream, once it is freed, until this stream has read it."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def mark(self) -> Any:
        """Return a mark behind all work of this stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let the current stream of the device, not the caller, wait for a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


class LateCount:
    """A number that a device counts; the host reads a value of some steps before."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self._last = 0

    def add(self, number: Tensor) -> None:
        """Add to it, always on the same stream."""
        self._total += number
        if self._event is None or self._event.query():  # else the copy before is under way
            self._seen.copy_(self._total, non_blocking=True)
            if self._event is not None:
                self._event.record()

    def read(self) -> int:
        """Return the last value that has arrived."""
        if self._event is None or self._event.query():
            self._last = int(self._seen)
        return self._last


def to_host(tensor: Tensor, *, copy: bool) -> Tensor:
    """Return a tensor in host memory, pinned and without waiting if it comes from a device."""
    if tensor.device.type == "cpu":
        return tensor.clone() if copy else tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
