"""A rank of `benchmarks.race`: one model, trained in a plain loop by one of the contestants.

Ranks, store and interface are in the environment, as `torchrun` has them. What is evaluated is the
mean of all replicas, parameters and buffers, after each epoch; that time is not counted.
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks import _tasks
from benchmarks._tasks import GPT, Part, ResNet20, cosine, lenet, loss

CONTEXT = 64
_LOCAL_SGD_PERIOD, _DILOCO_PERIOD, _WARM_UP = 8, 32, 0.05


class Task(NamedTuple):
    """What is trained; `batch` counts the samples of all ranks in a step."""

    model: Callable[[], nn.Module]
    parts: Callable[[], tuple[Part, Part]]
    batch: int
    epochs: int
    rates: tuple[float, ...]  # searched for each contestant
    optimizer: type[Optimizer] = torch.optim.SGD
    metric: str = "accuracy"  # or "loss"
    augments: bool = False

    def make_optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Its learning rate is set before each step."""
        if self.optimizer is torch.optim.SGD:
            return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
        return self.optimizer(parameters, lr=1.0, weight_decay=0.01)  # type: ignore[call-arg]


def _text() -> tuple[Part, Part]:
    train, test = (_tasks.pieces(part, CONTEXT) for part in (0, 1))
    return train, test


TASKS = {
    "LeNet": Task(lenet, lambda: _tasks.whole("fashion-mnist"), 256, 4, (0.05, 0.1)),
    "ResNet-20": Task(
        *(ResNet20, lambda: _tasks.whole("cifar10-small"), 128, 4, (0.1, 0.2)), augments=True
    ),
    "GPT": Task(
        lambda: GPT(context=CONTEXT, layers=2),
        *(_text, 128, 2, (0.004, 0.008), torch.optim.AdamW, "loss"),
    ),
}


class Contestant:
    """Trains alone."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model = model  # whose parameters and buffers are evaluated
        self.called = model
        self.optimizers = [task.make_optimizer(model.parameters())]

    def step(self, x: Tensor, y: Tensor) -> None:
        """Forward, backward, update."""
        loss(self.called(x), y).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def close(self) -> None:
        """Takes links down."""


class DDP(Contestant):
    """torch's own."""

    def __init__(self, model: nn.Module, task: Task, hook: str = "") -> None:
        super().__init__(model, task)
        self.called = parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False
        if hook == "fp16":
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=10
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class LocalSGD(Contestant):
    """torch's average of the weights in every eighth step."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__(model, task)
        self._averager = PeriodicModelAverager(period=_LOCAL_SGD_PERIOD)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizers[0].zero_grad()
        loss(self.called(x), y).backward()
        self.optimizers[0].step()
        self._averager.average_parameters(self.model.parameters())  # of those with a gradient


class DiLoCo(Contestant):
    """Douillard et al., arXiv:2311.08105, Algorithm 1, with the paper's outer optimizer."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__(model, task)
        self._outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self._sgd = torch.optim.SGD(self._outer, lr=0.7, momentum=0.9, nesterov=True)
        self._step = 0

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> None:
        with torch.enable_grad():
            super().step(x, y)
        self._step += 1
        if self._step % _DILOCO_PERIOD:
            return
        inner = list(self.model.parameters())
        flat = torch.cat([(o - p).flatten() for o, p in zip(self._outer, inner, strict=True)])
        dist.all_reduce(flat)
        pieces = flat.div_(dist.get_world_size()).split([p.numel() for p in inner])
        for outer, piece in zip(self._outer, pieces, strict=True):
            outer.grad = piece.view_as(outer)
        self._sgd.step()
        for outer, parameter in zip(self._outer, inner, strict=True):
            parameter.copy_(outer)


class DecentDP(Contestant):
    """Its wrapper owns the optimizers, one a bucket, and updates during backward.

    With its own AccumAdamW in place of AdamW.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        from decent_dp.ddp import DecentralizedDataParallel
        from decent_dp.optim import optim_fn_accum_adamw
        from loguru import logger

        logger.remove()
        self.model = model
        self.optimizers = []

        def make(named: list[tuple[str, Tensor]]) -> Optimizer:
            if task.optimizer is torch.optim.SGD:
                self.optimizers.append(task.make_optimizer([p for _, p in named]))
            else:
                self.optimizers.append(optim_fn_accum_adamw(named, lr=1.0, weight_decay=0.01))
            for group in self.optimizers[-1].param_groups:
                group["lr"] = self._rate
            return self.optimizers[-1]

        self.called = DecentralizedDataParallel(
            model, optim_fn=make, topology="one-peer-exp", _local_world_size=1
        )

    def set_rate(self, rate: float) -> None:
        self._rate = rate
        super().set_rate(rate)

    def step(self, x: Tensor, y: Tensor) -> None:
        loss(self.called(x), y).backward()


class Gossip(Contestant):
    """`gg.gossip`."""

    def __init__(self, model: nn.Module, task: Task, **options: Any) -> None:
        super().__init__(model, task)
        self._session = gg.gossip(model, self.optimizers[0], **options)

    def close(self) -> None:
        self._session.close()


_CORRECTED = {"mode": gg.Sync(momentum=0.9), "wire_dtype": torch.bfloat16}
CONTESTANTS: dict[str, Callable[[nn.Module, Task], Contestant]] = {
    "DDP": DDP,
    "DDP, fp16 hook": partial(DDP, hook="fp16"),
    "DDP, PowerSGD": partial(DDP, hook="PowerSGD"),
    "local SGD, period 8": LocalSGD,
    "DiLoCo, period 32": DiLoCo,
    "Decent-DP": DecentDP,
    "gossip": Gossip,
    "gossip, bf16 wire": partial(Gossip, wire_dtype=torch.bfloat16),
    "gossip, every second step, bf16 wire": partial(Gossip, every=2, wire_dtype=torch.bfloat16),
    "gossip, sync with momentum, bf16 wire": partial(Gossip, **_CORRECTED),
    "gossip, sync with momentum and overlap, bf16 wire": partial(
        Gossip,
        mode=gg.Sync(momentum=0.9, overlap=True),
        exchanges=2,
        wire_dtype=torch.bfloat16,
    ),
}


@torch.no_grad()
def evaluate(model: nn.Module, test: Part) -> dict[str, float]:
    """Accuracy and mean loss of the mean of all replicas; each rank takes a share of the test."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mean = copy.deepcopy(model).eval()
    for tensor in (*mean.parameters(), *mean.buffers()):
        if tensor.is_floating_point():
            whole = tensor.detach().clone().contiguous()
            dist.all_reduce(whole)
            tensor.copy_(whole / world_size)
    x, y = (part[rank::world_size] for part in test)
    sums = torch.zeros(3, dtype=torch.float64)
    for piece_x, piece_y in zip(x.split(250), y.split(250), strict=True):
        outputs = mean(piece_x)
        right = (outputs.argmax(-1) == piece_y).sum()
        count = piece_y.numel()
        sums += torch.tensor([int(right), float(loss(outputs, piece_y)) * count, count])
    dist.all_reduce(sums)
    right, total, count = sums.tolist()
    return {"accuracy": right / count, "loss": total / count}


def main() -> None:
    """Trains; rank 0 writes a line of JSON an epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--contestant", choices=CONTESTANTS, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, rank, world_size = TASKS[options.task], dist.get_rank(), dist.get_world_size()
    (train_x, train_y), test = task.parts()
    torch.manual_seed(options.seed)
    contestant = CONTESTANTS[options.contestant](task.model(), task)
    orders = torch.Generator().manual_seed(options.seed)  # the same on all ranks
    augmentation = torch.Generator().manual_seed(1000 * options.seed + rank)
    steps = len(train_y) // task.batch
    total, done, seconds = options.epochs * steps, 0, 0.0
    for epoch in range(options.epochs):
        order = torch.randperm(len(train_y), generator=orders)
        dist.barrier()
        begin = time.perf_counter()
        for step in range(steps):
            rows = order[step * task.batch : (step + 1) * task.batch][rank::world_size]
            x, y = train_x[rows], train_y[rows]
            x = _tasks.crop_and_flip(x, augmentation) if task.augments else x
            contestant.set_rate(cosine(options.rate, done, total, round(_WARM_UP * total)))
            contestant.step(x, y)
            done += 1
        dist.barrier()
        seconds += time.perf_counter() - begin
        found = {"epoch": epoch + 1, "seconds": round(seconds, 3)}
        found |= evaluate(contestant.model, test)
        if rank == 0:
            with options.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
    contestant.close()
    dist.barrier()
    os._exit(0)  # threads of a peer's hook may abort an orderly exit


if __name__ == "__main__":
    main()
