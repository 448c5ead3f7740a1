"""Gradients averaged in every step by DistributedDataParallel."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gossipgrad.comm import Faults
from gossipgrad.train._options import check_fields, make_plain

from ._lockstep import Lockstep, share_muon
from ._strategy import Replica, Setting, Strategy, check_ranks, ring_bytes

ALL_REDUCED = "computed: ring all-reduce, 2 (p - 1) / p of the gradient bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceConfig:
    """How gradients are averaged; used by `strategy` allreduce alone."""

    faults: str | None = None
    """Delays to try the run with, by rank and step from 0: "delay rank=1 rounds=20-29
    seconds=0.05", several with ; between. All ranks wait for the longest of a step, since every
    rank's part passes over every link."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        faults = Faults.parse(self.faults or "")
        if faults.drops or faults.kills:
            raise ValueError(
                f"faults is {self.faults!r}, but an all-reduce with a lost part or rank ends the "
                "run; give delays alone, or take --strategy gossip."
            )
        if not faults.ranks:
            object.__setattr__(self, "faults", None)


class AllReduce(Lockstep):
    """DistributedDataParallel: gradients averaged over all ranks in every step."""

    def __init__(
        self,
        model: nn.Module,
        stop: threading.Event,
        delays: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(model, stop)
        self._handed_over_seconds: float | None = None
        self._delays = delays or {}
        self._step = 0
        self._wrap(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        # Buffers are rank 0's at the start, and each rank's own from then on. Not as the argument
        # of that name, which torch 2.13 deprecates: they would be each rank's own at once.
        parallel.broadcast_buffers = False
        parallel.register_comm_hook(self, AllReduce._hook)
        self.model = parallel
        return parallel

    @staticmethod
    def _hook(self: "AllReduce", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce a bucket, and look at the clock: behind the last one there is no compute."""
        self._handed_over_seconds = perf_counter()
        self._bytes_sent += ring_bytes(bucket.buffer().nbytes, self._world_size)
        group = dist.group.WORLD
        assert group is not None
        reduced = allreduce_hook(group, bucket)
        seconds = self._delays.get(self._step, 0.0)
        if not seconds or not bucket.is_last():
            return reduced
        due_seconds = self._handed_over_seconds + seconds

        def late(future: torch.futures.Future[Tensor]) -> Tensor:
            sleep(max(0.0, due_seconds - perf_counter()))
            return future.value()

        return reduced.then(late)

    def should_stop(self, step: int, *, is_asked: bool) -> bool:
        self._step = step - 1
        return super().should_stop(step, is_asked=is_asked)

    def no_sync(self) -> AbstractContextManager[None]:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        return self.model.no_sync()

    def _finish_backward(self) -> None:
        if self._handed_over_seconds is not None:
            self._exposed_seconds += perf_counter() - self._handed_over_seconds
            self._handed_over_seconds = None


class AllReduceStrategy(Strategy):
    """DistributedDataParallel."""

    name = "allreduce"
    help = "DistributedDataParallel"
    bytes_are = ALL_REDUCED
    section = "allreduce"
    options_type = AllReduceConfig
    may_change_on_resume = frozenset({"faults"})

    def check(self, options: AllReduceConfig, setting: Setting) -> None:
        check_ranks(options.faults, setting.world_size)

    def build(self, replica: Replica, setting: Setting, options: AllReduceConfig) -> AllReduce:
        delays: dict[int, float] = {}
        for (_, step), seconds in Faults.parse(options.faults or "").delays.items():
            delays[step] = max(seconds, delays.get(step, 0.0))
        share_muon(replica.optimizers)
        running = AllReduce(replica.model, replica.stop, delays)
        if options.faults is not None:
            running.notes.append(f"faults by script: {options.faults}")
        return running
