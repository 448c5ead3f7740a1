"""Who is measured: ways to keep replicas together, each with a replayed model of its own.

Beside them stand the bare transfers that their bounds are made of. Those that send gradients as
backward finishes them get buckets that are scaled with the profile, so that they have as many as at
full size; gossip() sends a snapshot and keeps its own default.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.comm import DEFAULT_BUCKET_BYTES
from gossipgrad.planning import Profile
from gossipgrad.topology import dissemination

from ._replay import Device, ReplayModel, ReplayOptimizer

_DDP_BUCKET_BYTES = 25 << 20  # torch's own default, and Decent-DP's
_DDP_FIRST_BUCKET_BYTES = 1 << 20  # by default: its gradients are the first to be ready
_SMALLEST_BUCKET_BYTES = 1 << 18  # below, a message costs more than its bytes
PERIOD = 8
STATE_EVERY = 4
SELDOM = f"state every {STATE_EVERY}"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a contestant runs: in the default process group, with this profile.

    Attributes:
        profile: Scaled to the budget.
        size_factor: By how much its sizes are smaller than those of the network.
        sparse: What contestants of sparse gradients need beside (`_sparse.Sparsified`).
    """

    profile: Profile
    size_factor: float
    sparse: Any = None

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

    def skip(self) -> bool:
        """Whether the next step is like the one before; if so it counts as taken."""
        return False

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


class Gossip(Contestant):
    def __init__(
        self,
        surroundings: Surroundings,
        mode: str = "overlap",
        *,
        payload: gg.WeightsAndState | str = "weights",
        wire_dtype: torch.dtype | None = None,
        update: str = "in-step",
    ) -> None:
        # As many messages as the model has unscaled: `sync` hides behind them one by one.
        size = surroundings.bucket_bytes(DEFAULT_BUCKET_BYTES) if mode == "sync" else None
        self._stateful = isinstance(payload, gg.WeightsAndState)
        super().__init__(surroundings)
        self._session = gg.gossip(
            self.model,
            self.optimizer,
            mode=mode,
            payload=payload,
            wire_dtype=wire_dtype,
            update=update,
            **({} if size is None else {"bucket_bytes": size}),
        )

    def _optimizer(self, profile: Profile, parameters: list[nn.Parameter]) -> ReplayOptimizer:
        return ReplayOptimizer(
            parameters, self.device, profile.optimizer_seconds, momentum=self._stateful
        )

    def clocks(self) -> dict[str, float]:
        stats = self._session.stats()
        return {"waiting": stats.exposed_seconds, "mixing": stats.mixing_seconds}

    def close(self) -> None:
        self._session.close()


class DDP(Contestant):
    def __init__(self, surroundings: Surroundings, hook: str | None = None) -> None:
        super().__init__(surroundings)
        size = surroundings.bucket_bytes(_DDP_BUCKET_BYTES)
        sizes = [_DDP_FIRST_BUCKET_BYTES * surroundings.size_factor, size]
        if hook == "PowerSGD":
            sizes = [1 << 40]  # on Gloo the hook works with one bucket only
        parallel = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=True,
            bucket_cap_mb_list=[size / (1 << 20) for size in sizes],  # type: ignore[arg-type]
        )
        if hook == "fp16":
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.model = parallel


class Layerwise(Contestant):
    def __init__(self, surroundings: Surroundings) -> None:
        from gossipgrad.train._spans import StepSpans
        from gossipgrad.train.strategies._agd import LayerwiseAllReduce

        super().__init__(surroundings)
        spans = StepSpans(dist.get_rank(), num_steps=0, total_steps=0)
        self._strategy = LayerwiseAllReduce(self.model, threading.Event(), spans)

    def _backward(self, loss: Tensor) -> None:
        self._strategy.backward(loss)

    def close(self) -> None:
        self._strategy.close()


class Local(Contestant):
    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)

    def step(self) -> None:
        super().step()
        self._averager.average_parameters(self.model.parameters())

    def skip(self) -> bool:
        alike = 1 <= self._averager.step % PERIOD < PERIOD - 1
        self._averager.step += alike
        return alike


class DecentDP(Contestant):
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


class Bare(Contestant):
    """Transfers without training: its step is the transfer alone."""

    def __init__(self, surroundings: Surroundings, what: str) -> None:
        self.device = Device()  # runs nothing
        elements = sum(p.numel() for p in ReplayModel(surroundings.profile, Device()).parameters())
        self._reduces = what.startswith("all-reduce")
        dtype = torch.bfloat16 if "bf16" in what else torch.float16 if "fp16" in what else None
        self._flat = torch.zeros(elements * (2 if "state" in what else 1), dtype=dtype)
        self._lengths = [len(self._flat)]  # of one round after the other
        if what.endswith(SELDOM):
            self._lengths += [elements] * (STATE_EVERY - 1)
        self._received = torch.empty_like(self._flat)
        self._schedule = dissemination(dist.get_world_size())
        self._round = 0

    def step(self) -> None:
        if self._reduces:
            dist.all_reduce(self._flat)
            return
        peers = self._schedule.peers(self._round, dist.get_rank())
        length = self._lengths[self._round % len(self._lengths)]
        self._round += 1
        assert peers.send_to is not None
        assert peers.recv_from is not None
        # Gloo knows no bfloat16 between two ranks; bytes are bytes.
        works = [
            dist.irecv(self._received[:length].view(torch.uint8), peers.recv_from),
            dist.isend(self._flat[:length].view(torch.uint8), peers.send_to),
        ]
        for work in works:
            assert work is not None
            work.wait()


class Alone(Contestant):
    """No communication: what the replay itself takes."""
