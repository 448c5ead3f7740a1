"""One step of gg.Muon and of torch.optim.Muon on the matrices of GPT-2 small, in time.

Both step the same parameters' shapes with the same gradients, by turns; torch's multiplies in bf16,
ours in fp32, as each does on a CPU by default. So that precision alone is not what is compared,
torch's is also run in fp32 (`torch-fp32`: its code, with the cast to bf16 replaced), and ours
without the Gram matrix (`ours-plain`) and one matrix at a time (`ours-single`). A layer is four
matrices; the shapes repeat, so a few layers stand for twelve. Reported are the smallest and the
median time over the turns, wall and processor, and how far the updates are from torch's in fp32.
torch's in bf16 is timed once, on its first step: without instructions for it a step takes minutes.

    python -m benchmarks.muon_step --layers 2 --turns 3
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import gossipgrad as gg
from benchmarks._common import write

LAYER = ((2304, 768), (768, 768), (3072, 768), (768, 3072))


def matrices(layers: int) -> list[nn.Parameter]:
    """Parameters with gradients; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in LAYER * layers:
        parameter = nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        found.append(parameter)
    return found


def ours(layers: int) -> Callable[[], list[nn.Parameter]]:
    """A step of gg.Muon."""
    parameters = matrices(layers)
    optimizer = gg.Muon(parameters, lr=0.02)
    return lambda: (optimizer.step(), parameters)[1]


def ours_single(layers: int) -> Callable[[], list[nn.Parameter]]:
    """The same, with every matrix in a product of its own."""
    parameters = matrices(layers)
    optimizers = [gg.Muon([parameter], lr=0.02) for parameter in parameters]
    return lambda: ([optimizer.step() for optimizer in optimizers], parameters)[1]


def ours_plain(layers: int) -> Callable[[], list[nn.Parameter]]:
    """The same, stacked, by products with the matrices themselves in every iteration."""
    step = ours(layers)

    def usual(m: int, n: int, polar: object) -> tuple[int, int]:
        return 0, 1

    def run() -> list[nn.Parameter]:
        with mock.patch("gossipgrad.muon._polar.flops", usual):
            return step()

    return run


def theirs(layers: int) -> Callable[[], list[nn.Parameter]]:
    """A step of torch.optim.Muon."""
    parameters = matrices(layers)
    optimizer = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.0)
    return lambda: (optimizer.step(), parameters)[1]


def theirs_fp32(layers: int) -> Callable[[], list[nn.Parameter]]:
    """The same, in fp32."""
    step = theirs(layers)

    def run() -> list[nn.Parameter]:
        with mock.patch.object(
            torch.Tensor, "bfloat16", lambda self: self.to(torch.float32, copy=True)
        ):
            return step()

    return run


WAYS = {
    "ours": ours,
    "ours-single": ours_single,
    "ours-plain": ours_plain,
    "torch": theirs,
    "torch-fp32": theirs_fp32,
}


ONCE = "torch"


def measure(layers: int, turns: int, names: list[str]) -> dict:
    """Times of a step of each way, by turns, and its distance from torch's in fp32."""
    steps = {name: WAYS[name](layers) for name in names}
    before = [p.detach().clone() for p in matrices(layers)]
    after, first = {}, {}
    for name, step in steps.items():
        start, busy = time.perf_counter(), time.process_time()
        found = step()
        first[name] = time.perf_counter() - start, time.process_time() - busy
        after[name] = [p.detach() - b for p, b in zip(found, before, strict=True)]
        print(f"{name:12} {first[name][0]:8.2f} s, first step", flush=True)
    expected = after.get("torch-fp32", after[names[0]])
    scale = sum(e.square().sum().item() for e in expected) ** 0.5
    figures: dict = {}
    for name, found in after.items():
        off = sum((f - e).square().sum().item() for f, e in zip(found, expected, strict=True))
        figures[name] = {"distance": off**0.5 / scale, "wall_s": [], "processor_s": []}
    if ONCE in names:
        figures[ONCE]["wall_s"], figures[ONCE]["processor_s"] = ([each] for each in first[ONCE])
        names = [name for name in names if name != ONCE]
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, busy = time.perf_counter(), time.process_time()
            steps[name]()
            figures[name]["processor_s"].append(time.process_time() - busy)
            figures[name]["wall_s"].append(time.perf_counter() - start)
            print(f"{name:12} {figures[name]['wall_s'][-1]:8.2f} s", flush=True)
    for of in figures.values():
        for kind in ("wall_s", "processor_s"):
            of[f"least_{kind}"], of[f"median_{kind}"] = min(of[kind]), statistics.median(of[kind])
    return figures


def profile(layers: int) -> dict[str, float]:
    """Where a step of ours spends processor seconds, by operation."""
    step = ours(layers)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    events = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)[:6]
    return {event.key: event.self_cpu_time_total / 1e6 for event in events}


def main() -> None:
    """Measures, and writes `results/muon_step.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    figures = measure(options.layers, options.turns, options.ways.split(","))
    load = os.getloadavg()[0]
    where = profile(options.layers)
    write("muon_step", {"layers": options.layers, "load": load, "ways": figures, "profile": where})
    fastest = figures["ours"]["least_processor_s"]
    for name, of in figures.items():
        least = of["least_processor_s"]
        print(f"{name:12} {of['least_wall_s']:.2f} s, processor {least:.2f} s", end=", ")
        print(f"{least / fastest:.2f} times ours, {of['distance']:.1e} from torch in fp32")


if __name__ == "__main__":
    main()
