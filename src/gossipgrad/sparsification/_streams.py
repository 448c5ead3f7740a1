"""Memory shared by the backward thread and the collectives' thread, on any device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Staging"]


class Staging:
    """Passes tensors between the backward thread and the collectives' thread, and host memory.

    On an accelerator collectives have a stream of their own. Kernels of backward continue while a
    message is copied: it waits only for work queued before the group was written. Gradients on the
    CPU are in host memory already, and nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        if self._stream is not None:
            self._written, self._done = torch.Event(device), torch.Event(device)
        self._host: dict[tuple[int, torch.dtype], Tensor] = {}

    def mark_written(self) -> None:
        """Mark that the backward thread has written the data for the other thread."""
        if self._stream is not None:
            self._written.record(torch.accelerator.current_stream(self._device))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Let the collectives' thread read the data and write results inside."""
        if self._stream is None:
            yield
            return
        with self._stream:
            self._stream.wait_event(self._written)
            yield
            self._done.record(self._stream)
        self._stream.synchronize()

    def wait_received(self) -> None:
        """Make the backward thread's reads follow the writes inside `on_stream`."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._done)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the values in host memory; pinned, and shared by calls of one size and type."""
        if self._stream is None:
            return tensor
        key = tensor.nbytes, tensor.dtype
        if key not in self._host:
            self._host[key] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        host = self._host[key].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return host

    def from_host(self, tensor: Tensor, out: Tensor) -> Tensor:
        """Return the values on the parameters' device: in `out`, or unchanged if there already."""
        return tensor if self._stream is None else out.copy_(tensor, non_blocking=True)
