"""Memory between the thread of backward and that of collectives, and clocks, on any device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

__all__ = ["Clock", "Staging", "make_clock", "make_staging"]


class Staging:
    """Passes tensors in host memory from the thread of backward to that of collectives, and back.

    Both threads see the same memory, and the queue and its tickets order them.
    """

    def mark_written(self) -> None:
        """The thread of backward has written what the other is to read."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Inside, the thread of collectives may read it, and write what came."""
        yield

    def wait_received(self) -> None:
        """After it the thread of backward may read what was written inside `on_stream`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """The same values in host memory."""
        return tensor

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """The same values beside the parameters: in `out`, or where they are."""
        return tensor


class StreamStaging(Staging):
    """Passes tensors on an accelerator, on a stream of the collectives' own.

    Kernels of backward go on while a message is copied to the host: only what was there when the
    group was written is awaited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._written = torch.Event(device)
        self._done = torch.Event(device)
        self._host: dict[int, Tensor] = {}

    def mark_written(self) -> None:
        """See `Staging.mark_written`."""
        self._written.record(torch.accelerator.current_stream(self._device))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """See `Staging.on_stream`."""
        with self._stream:
            self._stream.wait_event(self._written)
            yield
            self._done.record(self._stream)
        self._stream.synchronize()

    def wait_received(self) -> None:
        """See `Staging.wait_received`."""
        torch.accelerator.current_stream(self._device).wait_event(self._done)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Staging.to_host`; into pinned memory that later calls for the same size share."""
        key = tensor.nbytes
        if key not in self._host or self._host[key].dtype != tensor.dtype:
            self._host[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host = self._host[key]
        host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """See `Staging.from_host`."""
        out.copy_(tensor, non_blocking=True)
        return out


class Clock:
    """Moments at which gradients are ready."""

    def now(self) -> Any:
        """This one."""
        return perf_counter()

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """From the first of them to each."""
        return [moment - moments[0] for moment in moments]


class StreamClock(Clock):
    """Moments on an accelerator, where a gradient is ready long after its hook was called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """See `Clock.now`; waits for nothing."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """See `Clock.seconds`; waits for the last."""
        moments[-1].synchronize()
        return [moments[0].elapsed_time(moment) / 1000 for moment in moments]


def make_clock(device: torch.device) -> Clock:
    """The one for gradients on a device."""
    return Clock() if device.type == "cpu" else StreamClock(device)


def make_staging(device: torch.device) -> Staging:
    """The one for tensors on a device."""
    return Staging() if device.type == "cpu" else StreamStaging(device)
