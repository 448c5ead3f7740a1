"""Between the thread of backward and that of collectives: who may read what, when."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

__all__ = ["Clock", "Hand", "make_clock", "make_hand"]


class Hand:
    """Hands tensors in host memory over: what was written before is there to be read.

    Both threads see the same memory, and the queue and its tickets order them.
    """

    def give(self) -> None:
        """The thread of backward has written what the other is to read."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the thread of collectives may read it; what it writes is then given back."""
        yield

    def take_back(self) -> None:
        """The thread of backward may read what was written inside `taken`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """The same values in host memory."""
        return tensor

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """The same values beside the parameters: in `out`, or where they are."""
        return tensor


class StreamHand(Hand):
    """Hands tensors on an accelerator over, on a stream of the collectives' own.

    Kernels of backward go on while a message is copied to the host: only what was there when the
    group was given is awaited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._given = torch.Event(device)
        self._done = torch.Event(device)
        self._host: dict[int, Tensor] = {}

    def give(self) -> None:
        """See `Hand.give`."""
        self._given.record(torch.accelerator.current_stream(self._device))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """See `Hand.taken`."""
        with self._stream:
            self._stream.wait_event(self._given)
            yield
            self._done.record(self._stream)
        self._stream.synchronize()

    def take_back(self) -> None:
        """See `Hand.take_back`."""
        torch.accelerator.current_stream(self._device).wait_event(self._done)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Hand.to_host`; into pinned memory that the next call for the same size uses too."""
        key = tensor.nbytes
        if key not in self._host or self._host[key].dtype != tensor.dtype:
            self._host[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host = self._host[key]
        host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """See `Hand.from_host`."""
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


def make_hand(device: torch.device) -> Hand:
    """The one for tensors on a device."""
    return Hand() if device.type == "cpu" else StreamHand(device)
