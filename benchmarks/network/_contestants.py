"""Ways to keep replicas together, each with a replayed model of its own, and bare transfers.

Those that send gradients as backward finishes them get buckets that are scaled with the profile, so
that they have as many as at full size; `gg.gossip` sends a snapshot and keeps its own default.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.comm import DEFAULT_BUCKET_BYTES
from gossipgrad.compression import SparseFormat, top_k
from gossipgrad.planning import PiecewiseCost, Profile
from gossipgrad.sparsification import _merged
from gossipgrad.topology import dissemination

from ._replay import Device, ReplayModel, ReplayOptimizer

_DDP_BUCKET_BYTES = 25 << 20  # torch's own default, and Decent-DP's
_DDP_FIRST_BUCKET_BYTES = 1 << 20  # by default: its gradients are the first to be ready
_SMALLEST_BUCKET_BYTES = 1 << 18  # below, a message costs more than its bytes
_PERIOD = 8
_MOST_ELEMENTS, _MOST_SECONDS = 1 << 27, 4.0
_MOST_ROUNDS, _COMPARED_ROUNDS = 200, 60  # until there is a plan, until it is final
Curve = dict[str, list[float]]


class Surroundings(NamedTuple):
    """Where a contestant runs: in the default process group."""

    profile: Profile  # scaled to the budget
    time_factor: float  # by how much its times are longer than those of the network
    size_factor: float  # by how much its sizes are smaller
    density: float | None = None  # of sparse gradients
    curve: Curve | None = None  # seconds of selection at full size

    def bucket_bytes(self, full_size: int) -> int:
        """A bucket that holds the same share of the model as `full_size` does at full size."""
        return max(_SMALLEST_BUCKET_BYTES, round(full_size * self.size_factor))


class Contestant:
    """No communication: what the replay itself takes."""

    def __init__(self, surroundings: Surroundings) -> None:
        profile = surroundings.profile
        self.device = Device()
        self.model: nn.Module = ReplayModel(profile, self.device)
        parameters = list(self.model.parameters())
        self.optimizer = ReplayOptimizer(parameters, self.device, profile.optimizer_seconds)
        self._x = torch.zeros(1, requires_grad=True)

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self._backward(self.model(self._x).sum())
        self.optimizer.step()

    def settle(self) -> None:
        """Whatever it needs before its steps are those that it takes for long."""

    def close(self) -> None:
        """Removes hooks and closes links."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()


class Gossip(Contestant):
    """`gg.gossip`."""

    def __init__(self, surroundings: Surroundings, **options: Any) -> None:
        super().__init__(surroundings)
        if options.get("mode") == "sync" or isinstance(options.get("mode"), gg.Sync):
            # As many messages as the model has unscaled: `sync` hides behind them one by one.
            options["bucket_bytes"] = surroundings.bucket_bytes(DEFAULT_BUCKET_BYTES)
        self._session = gg.gossip(self.model, self.optimizer, **options)

    def close(self) -> None:
        self._session.close()


class DDP(Contestant):
    """torch's own."""

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
    """Layer-wise asynchronous all-reduce: the baseline that GossipGraD's authors call AGD.

    An all-reduce of a layer begins in backward when its last gradient is there; the step waits for
    all of them before the update. Deviations from their code: a message a layer, not a parameter;
    Gloo matches all-reduces by their order, so a layer that is ready early waits for its turn.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        layers = [list(module.parameters(recurse=False)) for module in self.model.modules()]
        self._layers = [layer for layer in reversed(layers) if layer]
        self._flats = [torch.zeros(sum(p.numel() for p in layer)) for layer in self._layers]
        for number, layer in enumerate(self._layers):
            for parameter in layer:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, number))
        self._expect()

    def _expect(self) -> None:
        self._missing = [len(layer) for layer in self._layers]
        self._works: list[Any] = []

    def _ready(self, number: int, _parameter: Tensor) -> None:
        self._missing[number] -= 1
        while len(self._works) < len(self._layers) and not self._missing[len(self._works)]:
            layer, flat = self._layers[len(self._works)], self._flats[len(self._works)]
            torch.cat([p.grad.flatten() for p in layer], out=flat)
            self._works.append(dist.all_reduce(flat, async_op=True))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        for layer, flat, work in zip(self._layers, self._flats, self._works, strict=True):
            work.wait()
            pieces = flat.div_(dist.get_world_size()).split([p.numel() for p in layer])
            for parameter, piece in zip(layer, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
        self._expect()


class Local(Contestant):
    """Local SGD: torch's average of the weights in every eighth step."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._averager = PeriodicModelAverager(period=_PERIOD, warmup_steps=_PERIOD - 1)

    def step(self) -> None:
        super().step()
        self._averager.average_parameters(self.model.parameters())


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
        self._flat = torch.zeros(elements, dtype=dtype)
        self._received = torch.empty_like(self._flat)
        self._schedule, self._round = dissemination(dist.get_world_size()), 0

    def step(self) -> None:
        if self._reduces:
            dist.all_reduce(self._flat)
            return
        peers = self._schedule.peers(self._round, dist.get_rank())
        self._round += 1
        # Gloo knows no bfloat16 between two ranks; bytes are bytes.
        works = [
            dist.irecv(self._received.view(torch.uint8), peers.recv_from),
            dist.isend(self._flat.view(torch.uint8), peers.send_to),
        ]
        for work in works:
            work.wait()


def measure_selection(most_elements: int = _MOST_ELEMENTS, density: float = 0.001) -> Curve:
    """Processor seconds by elements of choosing the largest, on one thread of this machine.

    Normal values; taking them out and packing the message is part of it.
    """
    sizes = [min(most_elements, 256 * 4**power) for power in range(20)]
    sizes = sorted(set(sizes))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    every = torch.randn(most_elements, generator=torch.Generator().manual_seed(0))
    seconds = []
    for size in sizes:
        values, count = every[:size], max(int(density * size), 1)
        form = SparseFormat(size, count)
        message = torch.empty(form.size_bytes, dtype=torch.uint8)
        times: list[float] = []
        while len(times) < 6 and sum(times) < _MOST_SECONDS:
            start = time.process_time()  # waiting for other work of the machine is not in it
            chosen = top_k(values, count)
            form.pack(chosen, values[chosen], message)
            times.append(time.process_time() - start)
        seconds.append(statistics.median(times[1:] or times))  # the first one takes memory
    torch.set_num_threads(threads)
    return {"elements": [float(size) for size in sizes], "seconds": seconds}


class Sparsified(Contestant):
    """`gg.sparsify`, whose selection sleeps for what it takes at full size.

    Every session measures its network and plans by the rule that it is given.
    """

    def __init__(self, surroundings: Surroundings, plan: str, *methods: str) -> None:
        super().__init__(surroundings)
        curve, self._factors = surroundings.curve, surroundings[1:3]
        assert curve is not None
        self._rule = plan
        self._cost = PiecewiseCost.fit(curve["elements"], curve["seconds"])
        self._session = gg.sparsify(
            self.model,
            self.optimizer,
            density=surroundings.density,
            plan=plan,
            methods=methods,
        )
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def _select(self, values: Tensor, count: int) -> Tensor:
        """As `top_k`, but of any elements."""
        key = elements, _ = len(values), count
        if key not in self._chosen:
            self._chosen[key] = torch.arange(count) * (elements // count)
        times, sizes = self._factors
        self.device.run(times * float(self._cost(elements / sizes)))
        self.device.end()  # a message cannot leave before it is chosen
        return self._chosen[key]

    def step(self) -> None:
        _merged.top_k = self._select  # contestants take turns in one thread
        super().step()

    def settle(self) -> None:
        """Steps until the session has a plan, and has compared it with dense ones."""
        rounds = _MOST_ROUNDS if self._rule in ("optimal", "greedy", "mg-wfbp") else 0
        for _ in range(rounds):
            self.step()
            if self._session.plan is not None:
                break
        for _ in range(_COMPARED_ROUNDS if self._rule == "optimal" else 0):
            self.step()

    def close(self) -> None:
        self._session.close()


class Kind(NamedTuple):
    """What a contestant is, and what a block of it is like."""

    make: Callable[[Surroundings], Contestant]
    bare: str | None = None
    steps: int = 1
    is_hidden: bool = False
    waits: bool = False  # for its partner before each step, so that ranks come in step


ALONE, EXCHANGE, REDUCE = "no communication", "bare exchange", "bare all-reduce"
BARE = (EXCHANGE, "bare exchange, bf16", REDUCE, "bare all-reduce, fp16")
KINDS: dict[str, Kind] = {
    **{n: Kind(lambda s, n=n: Bare(s, n.removeprefix("bare "))) for n in BARE},
    ALONE: Kind(Contestant),
    "gossip": Kind(Gossip, EXCHANGE, is_hidden=True),
    "gossip, sync": Kind(lambda s: Gossip(s, mode="sync"), EXCHANGE, is_hidden=True, waits=True),
    "gossip, sync with momentum, bf16 wire": Kind(
        lambda s: Gossip(s, mode=gg.Sync(momentum=0.9), wire_dtype=torch.bfloat16),
        "bare exchange, bf16",
        is_hidden=True,
        waits=True,
    ),
    "gossip, sync with momentum, two exchanges, bf16 wire": Kind(
        lambda s: Gossip(s, mode=gg.Sync(momentum=0.9), exchanges=2, wire_dtype=torch.bfloat16),
        EXCHANGE,
        is_hidden=True,
        waits=True,
    ),
    "gossip, sync with momentum and overlap, bf16 wire": Kind(
        lambda s: Gossip(
            s,
            mode=gg.Sync(momentum=0.9, overlap=True),
            exchanges=2,
            wire_dtype=torch.bfloat16,
        ),
        EXCHANGE,
        is_hidden=True,
        waits=True,
    ),
    "gossip, bf16 wire": Kind(
        lambda s: Gossip(s, wire_dtype=torch.bfloat16), "bare exchange, bf16", is_hidden=True
    ),
    "ddp": Kind(DDP, REDUCE),
    "ddp, fp16 hook": Kind(lambda s: DDP(s, "fp16"), "bare all-reduce, fp16"),
    "ddp, PowerSGD": Kind(lambda s: DDP(s, "PowerSGD")),
    "agd": Kind(Layerwise, REDUCE),
    "local SGD, period 8": Kind(Local, steps=_PERIOD),
    "Decent-DP, ring": Kind(lambda s: DecentDP(s, "ring"), EXCHANGE, is_hidden=True),
    "Decent-DP, one-peer exponential": Kind(
        lambda s: DecentDP(s, "one-peer-exp"), EXCHANGE, is_hidden=True
    ),
}
SPARSE: dict[str, Kind] = {
    "wfbp": Kind(lambda s: Sparsified(s, "wfbp", "dense")),
    "mg-wfbp": Kind(lambda s: Sparsified(s, "mg-wfbp", "dense")),
    "topk": Kind(lambda s: Sparsified(s, "single", "sparse")),
    "lags": Kind(lambda s: Sparsified(s, "layerwise", "sparse")),
    "greedy": Kind(lambda s: Sparsified(s, "greedy", "sparse")),
    "ours": Kind(lambda s: Sparsified(s, "optimal", "sparse", "dense", "fp16")),
}
KINDS |= SPARSE
