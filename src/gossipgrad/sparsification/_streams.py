"""Memory shared by the backward thread and the collectives' thread, and clocks, on any device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

__all__ = ["Clock", "Staging", "make_clock", "make_staging"]


class Staging:
    """Passes tensors in host memory between the backward thread and the collectives' thread."""

    def mark_written(self) -> None:
        """Mark that the backward thread has written the data for the other thread."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Let the collectives' thread read the data and write results inside."""
        yield

    def wait_received(self) -> None:
        """Make the backward thread's reads follow the writes inside `on_stream`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the values in host memory."""
        return tensor

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Return the values on the parameters' device: in `out`, or unchanged if there already."""
        return tensor


class StreamStaging(Staging):
    """Passes tensors on an accelerator, on a separate stream for collectives."""

    # Kernels of backward continue while a message is copied: it waits only for work queued before
    # the group was written.

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
    """Records when gradients are ready."""

    def now(self) -> Any:
        """Return the current moment."""
        return perf_counter()

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """Return the seconds from the first moment to each."""
        return [moment - moments[0] for moment in moments]


class StreamClock(Clock):
    """Records moments on an accelerator, where a gradient is ready long after its hook."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """See `Clock.now`; does not wait."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """See `Clock.seconds`; waits for the last."""
        moments[-1].synchronize()
        return [moments[0].elapsed_time(moment) / 1000 for moment in moments]


def make_clock(device: torch.device) -> Clock:
    """Return the clock for gradients on a device."""
    return Clock() if device.type == "cpu" else StreamClock(device)


def make_staging(device: torch.device) -> Staging:
    """Return the staging for tensors on a device."""
    return Staging() if device.type == "cpu" else StreamStaging(device)
