"""How long the all-reduce of DistributedDataParallel keeps a step waiting."""

from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


class RingClock:
    """State of a communication hook that does the usual all-reduce and looks at the clock.

    The last bucket is handed over when the last gradients of the backward pass are ready; all that
    remains until the backward pass returns is communication, the wait for slower ranks included.
    """

    def __init__(self, world_size: int) -> None:
        self.exposed_seconds = 0.0
        self.bytes_sent = 0
        self._world_size = world_size
        self._handed_over_seconds: float | None = None

    @staticmethod
    def hook(clock: "RingClock", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """All-reduce a bucket, as DistributedDataParallel does on its own."""
        clock._handed_over_seconds = perf_counter()
        clock.bytes_sent += ring_bytes(bucket.buffer().nbytes, clock._world_size)
        group = dist.group.WORLD
        assert group is not None
        return allreduce_hook(group, bucket)

    def backward_returned(self) -> None:
        """Add the wait of the backward pass that has just returned."""
        if self._handed_over_seconds is not None:
            self.exposed_seconds += perf_counter() - self._handed_over_seconds
            self._handed_over_seconds = None


def ring_bytes(size_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `size_bytes`.

    Example:
        >>> ring_bytes(1000, 4)
        1500
    """
    return 2 * (world_size - 1) * size_bytes // world_size
