"""Muon: the time of a step at GPT-2 small's shapes, beside torch's, and shared by ranks.

* `speed`: `gg.Muon` and `torch.optim.Muon`, whose products are in bf16, and in fp32 where that is
  taken out of it. Alternating, medians.
* `sharing`: processes with equal gradients, one thread each, as under DistributedDataParallel,
  each polarising everything or its share, and FSDP2 with its share. Operations of products and
  processor time of a rank in `step()`, medians, of the rank that has most: what a step takes where
  each rank has a core of its own. Seconds are those of this machine, whose cores they share.

    python -m benchmarks.muon speed
    python -m benchmarks.muon sharing --processes 1 2 4
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gossipgrad as gg
from benchmarks._common import in_processes, tell, write

SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072))  # of a block: outputs, inputs


def blocks(count: int) -> nn.Module:
    """The hidden matrices of some of the 12 blocks."""
    torch.manual_seed(0)
    layers = [nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES * count]
    return nn.Sequential(*layers)


def set_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The same in each call."""
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


@contextlib.contextmanager
def in_fp32() -> Iterator[None]:
    """torch.optim.Muon multiplies in bf16; here it does not."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda self: self.to(copy=True)):
        yield


def timed(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, alternating, after one step of each."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat:
                found[name].append(time.perf_counter() - begin)
    return {name: round(statistics.median(each), 3) for name, each in found.items()}


def speed(count: int, repeats: int) -> dict[str, Any]:
    """Seconds a step."""
    steps: dict[str, Callable[[], Any]] = {}
    for name in ("muon", "polar-express"):
        model = blocks(count)
        set_gradients(model.parameters())
        steps[f"gg.Muon, {name}"] = gg.Muon(list(model.parameters()), polar=name).step
    model = blocks(count)
    set_gradients(model.parameters())
    theirs = torch.optim.Muon(model.parameters(), lr=0.02)

    def step_in_fp32() -> None:
        with in_fp32():
            theirs.step()

    steps |= {"torch.optim.Muon": theirs.step, "torch.optim.Muon in fp32": step_in_fp32}
    return timed(steps, repeats)


def shared(group: Any, way: str, count: int, repeats: int) -> dict[str, float]:
    """The figures of one rank."""
    torch.set_num_threads(1)
    model: Any = blocks(count)
    gradients = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for p in model.parameters()
    ]
    if way == "rows":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import distribute_tensor

        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        gradients = [
            distribute_tensor(gradient, p.device_mesh, p.placements)
            for gradient, p in zip(gradients, model.parameters(), strict=True)
        ]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    ranks = dist.group.WORLD if way == "copies" else None
    optimizer = gg.Muon(model, muon=["*"], process_group=ranks)

    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    processor, seconds = [], []
    for _ in range(repeats):
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        optimizer.step()
        processor.append(time.process_time() - busy)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return {
        "operations": counter.get_total_flops(),
        "processor_seconds": round(statistics.median(processor), 3),
        "seconds": round(statistics.median(seconds), 3),
    }


def main() -> None:
    """Fills `results/muon_speed.json` or `results/muon_sharing.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("question", choices=("speed", "sharing"))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2, 4))
    options = parser.parse_args()
    count, repeats = options.blocks, options.repeats
    found: dict[str, Any] = {}
    if options.question == "speed":
        found = speed(count, repeats)
        found["of torch.optim.Muon in fp32"] = round(
            found["gg.Muon, muon"] / found["torch.optim.Muon in fp32"], 3
        )
        tell("seconds", found)
    else:
        for processes in options.processes:
            for way in ("alone", "copies", "rows")[: 3 if processes > 1 else 1]:
                of_ranks = in_processes(processes, shared, way, count, repeats)
                most = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
                found[f"{processes}, {way}"] = most
                tell(f"{processes} processes, {way}", most)
    write(f"muon_{options.question}", {"blocks": count, "found": found}, module="muon")


if __name__ == "__main__":
    main()
