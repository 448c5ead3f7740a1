"""Who is measured: ways to keep replicas together, each with a replayed model of its own.

Beside them stand the bare transfers that their bounds are made of. Those that send gradients as
backward finishes them get buckets that are scaled with the profile, so that they have as many as at
full size; gossip() sends a snapshot and keeps its own default.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.planning import Profile
from gossipgrad.topology import dissemination

from ._replay import Device, ReplayModel, ReplayOptimizer

_DDP_BUCKET_BYTES = 25 << 20  # torch's own default, and Decent-DP's
_SMALLEST_BUCKET_BYTES = 1 << 18  # below, a message costs more than its bytes
PERIOD = 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a contestant is.

    Attributes:
        make: Gets rank-local surroundings, returns a contestant.
        bare: The bare transfer that its second bound is made of, None if it sends nothing.
        mixes: Whether it mixes in every step.
        steps: Steps of a block are a multiple of this.
        warm_up: Steps of each block that are not counted: what was left in flight from the block
            before makes the first one shorter, and ranks that need not wait for each other are not
            in step for long, as they are when they begin together.
    """

    make: "Callable[[Surroundings], Contestant]"
    bare: str | None = None
    mixes: bool = True
    steps: int = 1
    warm_up: int = 0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a contestant runs: in the default process group, with this profile.

    Attributes:
        profile: Scaled to the budget.
        size_factor: By how much its sizes are smaller than those of the network.
    """

    profile: Profile
    size_factor: float

    def bucket_bytes(self, full_size: int) -> int:
        """A bucket that holds the same share of the model as `full_size` does at full size."""
        return max(_SMALLEST_BUCKET_BYTES, round(full_size * self.size_factor))


class Contestant:
    """A replayed model in training; `wrap` and the hooks are what differs."""

    def __init__(self, surroundings: Surroundings) -> None:
        profile = surroundings.profile
        self.device = Device()
        self.model: nn.Module = ReplayModel(profile, self.device)
        self.optimizer = self._optimizer(profile, list(self.model.parameters()))
        self._x = torch.zeros(1, requires_grad=True)

    def _optimizer(self, profile: Profile, parameters: list[nn.Parameter]) -> ReplayOptimizer:
        return ReplayOptimizer(parameters, self.device, profile.optimizer_seconds)

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self._backward(self.model(self._x).sum())
        self.optimizer.step()

    def clocks(self) -> dict[str, float]:
        """Seconds that it has counted itself so far, by what they were spent on."""
        return {}

    def close(self) -> None:
        """Lets go of hooks and links."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()


class _Gossip(Contestant):
    def __init__(
        self, surroundings: Surroundings, mode: str, wire_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(surroundings)
        self._session = gg.gossip(
            self.model,
            self.optimizer,
            mode=mode,
            wire_dtype=wire_dtype,
        )

    def clocks(self) -> dict[str, float]:
        stats = self._session.stats()
        return {"waiting": stats.exposed_seconds, "mixing": stats.mixing_seconds}

    def close(self) -> None:
        self._session.close()


class _DDP(Contestant):
    def __init__(self, surroundings: Surroundings, hook: str | None = None) -> None:
        super().__init__(surroundings)
        size = surroundings.bucket_bytes(_DDP_BUCKET_BYTES)
        if hook == "PowerSGD":
            size = 1 << 40  # on Gloo the hook works with one bucket only
        parallel = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, bucket_cap_mb=size / (1 << 20)
        )
        if hook == "fp16":
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.model = parallel


class _LayerwiseAllReduce(Contestant):
    def __init__(self, surroundings: Surroundings) -> None:
        from gossipgrad.train._spans import StepSpans
        from gossipgrad.train._strategies._agd import LayerwiseAllReduce

        super().__init__(surroundings)
        spans = StepSpans(dist.get_rank(), num_steps=0, total_steps=0)
        self._strategy = LayerwiseAllReduce(self.model, threading.Event(), spans)

    def _backward(self, loss: Tensor) -> None:
        self._strategy.backward(loss)

    def close(self) -> None:
        self._strategy.close()


class _Local(Contestant):
    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)

    def step(self) -> None:
        super().step()
        self._averager.average_parameters(self.model.parameters())


class _DecentDP(Contestant):
    """Its wrapper owns the optimizers, one a bucket, and updates during backward."""

    def __init__(self, surroundings: Surroundings, topology: str) -> None:
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        self._elements = sum(surroundings.profile.elements)
        self._update_seconds = surroundings.profile.optimizer_seconds
        super().__init__(surroundings)
        self.model = DecentralizedDataParallel(
            self.model,
            optim_fn=self._for_bucket,
            topology=topology,
            bucket_size_in_mb=surroundings.bucket_bytes(_DDP_BUCKET_BYTES) / (1 << 20),
            _local_world_size=1,
        )

    def _for_bucket(self, named: list[tuple[str, Tensor]]) -> ReplayOptimizer:
        parameters = [parameter for _, parameter in named]
        share = sum(p.numel() for p in parameters) / self._elements
        return ReplayOptimizer(parameters, self.device, self._update_seconds * share)

    def step(self) -> None:
        self.model(self._x).sum().backward()


class _Bare(Contestant):
    """Transfers without training: its step is the transfer alone."""

    def __init__(self, surroundings: Surroundings, what: str) -> None:
        self.device = Device()  # runs nothing
        elements = sum(p.numel() for p in ReplayModel(surroundings.profile, Device()).parameters())
        self._what = what
        dtype = torch.bfloat16 if "bf16" in what else torch.float16 if "fp16" in what else None
        self._flat = torch.zeros(elements, dtype=dtype)
        self._received = torch.empty_like(self._flat)
        self._schedule = dissemination(dist.get_world_size())
        self._round = 0

    def step(self) -> None:
        if self._what.startswith("all-reduce"):
            dist.all_reduce(self._flat)
            return
        peers = self._schedule.peers(self._round, dist.get_rank())
        self._round += 1
        assert peers.send_to is not None
        assert peers.recv_from is not None
        # Gloo knows no bfloat16 between two ranks; bytes are bytes.
        works = [
            dist.irecv(self._received.view(torch.uint8), peers.recv_from),
            dist.isend(self._flat.view(torch.uint8), peers.send_to),
        ]
        for work in works:
            assert work is not None
            work.wait()


class _Alone(Contestant):
    """No communication: what the replay itself takes."""


CONTESTANTS: dict[str, Kind] = {
    "no communication": Kind(make=_Alone, mixes=False),
    "gossip": Kind(make=lambda s: _Gossip(s, "overlap"), bare="exchange", warm_up=2),
    "gossip, sync": Kind(make=lambda s: _Gossip(s, "sync"), bare="exchange"),
    "gossip, bf16 wire": Kind(
        make=lambda s: _Gossip(s, "overlap", torch.bfloat16), bare="exchange, bf16", warm_up=2
    ),
    "ddp": Kind(make=_DDP, bare="all-reduce"),
    "ddp, fp16 hook": Kind(make=lambda s: _DDP(s, "fp16"), bare="all-reduce, fp16"),
    "ddp, PowerSGD": Kind(make=lambda s: _DDP(s, "PowerSGD")),
    "agd": Kind(make=_LayerwiseAllReduce, bare="all-reduce"),
    "local SGD, period 8": Kind(make=_Local, mixes=False, steps=PERIOD),
    "Decent-DP, ring": Kind(make=lambda s: _DecentDP(s, "ring"), bare="exchange", warm_up=2),
    "Decent-DP, one-peer exponential": Kind(
        make=lambda s: _DecentDP(s, "one-peer-exp"), bare="exchange", warm_up=2
    ),
}
BARE: dict[str, Kind] = {
    what: Kind(make=lambda s, what=what: _Bare(s, what), mixes=False)
    for what in ("exchange", "exchange, bf16", "all-reduce", "all-reduce, fp16")
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one rank has measured.

    Attributes:
        seconds: Of each step after the warm-up.
        planned_seconds: Compute of the emulated device in them.
        late_seconds: By how much it was late.
        clocks: What the contestant has counted in them.
    """

    seconds: list[float]
    planned_seconds: float
    late_seconds: float
    clocks: dict[str, float]


def run_block(contestant: Contestant, warm_up: int, steps: int) -> Block:
    """Trains for some steps, the first `warm_up` of them unmeasured."""
    for _ in range(warm_up):
        contestant.step()
    contestant.device.reset()
    before = contestant.clocks()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        contestant.step()
        seconds.append(time.perf_counter() - start)
    return Block(
        seconds=seconds,
        planned_seconds=contestant.device.planned_seconds,
        late_seconds=contestant.device.late_seconds,
        clocks={what: value - before[what] for what, value in contestant.clocks().items()},
    )
