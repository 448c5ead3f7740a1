"""How busy the machine's processors are, and with whose work."""

import os
from pathlib import Path

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class CpuBusy:
    """How busy all of the machine's CPUs are from now on, whatever runs on them."""

    def __init__(self) -> None:
        self._before = _fields()

    def shares(self, own_user_seconds: float) -> tuple[float, float]:
        """Of all time: what was busy, and what was taken by other programs.

        The others' share is their time in user mode, and what the host of a virtual machine took:
        the kernel's work for the shaped links is booked on whoever it interrupts.

        Args:
            own_user_seconds: What those had in user mode whose own work is measured.
        """
        user, nice, _, idle, waiting, *_, stolen = spent = [
            now - then for now, then in zip(_fields(), self._before, strict=True)
        ]
        total = max(1, sum(spent))
        others = max(0.0, user + nice - own_user_seconds / _TICK_SECONDS) + stolen
        return 1 - (idle + waiting) / total, others / total


def _fields() -> list[int]:
    """Ticks: user, nice, system, idle, waiting for disks, interrupts of two kinds, stolen."""
    with Path("/proc/stat").open() as stat:
        return [int(field) for field in stat.readline().split()[1:9]]
