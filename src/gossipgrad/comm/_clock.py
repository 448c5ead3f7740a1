"""When work is done on a device, long after it was called."""

import time
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Clock"]


class Clock:
    """Records moments: of an accelerator when it gets there, of the CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return the current moment; does not wait."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """Return the seconds from the first moment to each; waits for the last."""
        if self._device.type == "cpu":
            return [moment - moments[0] for moment in moments]
        moments[-1].synchronize()
        return [moments[0].elapsed_time(moment) / 1000 for moment in moments]
