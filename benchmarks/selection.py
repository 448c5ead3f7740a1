"""The largest magnitudes of a tensor: ours, torch's and numpy's ways, in time and memory.

Every way selects from the same values by turns, in an order that changes from turn to turn. All
return int64 indices; ours are in ascending order, the others in none. Values are normal, Laplace,
Student's t with two degrees of freedom, or what error feedback leaves: per-tensor scales that
differ a hundredfold, a fifth of zeros, and the largest of four steps sent already. Memory is how
much more of it the process has at its highest than before the call, measured on Linux in a process
of its own that gives everything back between calls; the indices that are returned are part of it.

Results are written after every cell and kept: what was measured is not measured again, so it may be
stopped, or run for some `--minutes` at a time. `--fresh` forgets them. It fills the tables of
`docs/selection.md`, too.

    python -m benchmarks.selection
"""

import argparse
import ctypes
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._common import RESULTS, write
from benchmarks._selection_page import fill_page
from gossipgrad.compression import top_k

SEED = 0
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 25_000_000, 100_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25)
RUNS = {1: ("normal", "laplace", "student", "accumulator"), 2: ("accumulator",)}
"""By torch's number of threads, the values that are selected from."""
SECONDS_A_CASE = 1.0
REPEATS = (3, 25)
Way = Callable[[Tensor, int], Any]


WAYS: dict[str, Way] = {
    "top_k": top_k,
    "partition": lambda values, count: top_k(values, count, method="partition"),
    "threshold": lambda values, count: top_k(values, count, method="threshold"),
    "torch.topk": lambda values, count: torch.topk(values.abs(), count, sorted=False).indices,
    "np.argpartition": lambda values, count: np.argpartition(np.abs(values.numpy()), -count)[
        -count:
    ],
}


def accumulator(numel: int, generator: torch.Generator) -> Tensor:
    """What error feedback carries over, roughly: see above."""
    scale, residual = torch.empty(numel), torch.zeros(numel)
    for tensor in scale.tensor_split(52):
        tensor.fill_(10 ** (2 * float(torch.rand((), generator=generator)) - 2))
    for _ in range(4):
        residual.addcmul_(scale, torch.randn(numel, generator=generator))
        residual[top_k(residual, numel // 1000)] = 0
    rows = residual[: numel // 64 * 64].view(-1, 64)
    rows[torch.rand(len(rows), generator=generator) < 0.2] = 0
    return residual


def student(numel: int, generator: torch.Generator) -> Tensor:
    """With two degrees of freedom: no variance."""
    values = torch.randn(numel, generator=generator)
    square = torch.rand(numel, generator=generator).clamp_(min=1e-30).log_().neg_()
    return values.div_(square.sqrt_())


def laplace(numel: int, generator: torch.Generator) -> Tensor:
    values = torch.rand(numel, generator=generator).sub_(0.5)
    sign = values.sign()
    return values.abs_().mul_(-2).log1p_().clamp_(min=-100).mul_(sign)


DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda numel, generator: torch.randn(numel, generator=generator),
    "laplace": laplace,
    "student": student,
    "accumulator": accumulator,
}


def compare(values: Tensor, count: int, order: random.Random) -> dict[str, Any]:
    """Seconds of every way by turns; the first turn warms up."""
    names = list(WAYS)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    turns, begun = 0, time.perf_counter()
    least, most = REPEATS
    while turns <= least or (turns <= most and time.perf_counter() - begun < SECONDS_A_CASE):
        order.shuffle(names)
        for name in names:
            start, cpu = time.perf_counter(), time.process_time()
            WAYS[name](values, count)
            spent = time.perf_counter() - start, time.process_time() - cpu
            if turns:
                taken[name].append(spent)
        turns += 1
    return {
        name: {
            "repeats": len(spent),
            "seconds_quartiles": quartiles([wall for wall, _ in spent]),
            "cpu_seconds_quartiles": quartiles([cpu for _, cpu in spent]),
        }
        for name, spent in taken.items()
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def peaks(numel: int) -> dict[str, dict[str, int]]:
    """By density and way, how many bytes more there are at the highest than before."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back
    values = DISTRIBUTIONS["accumulator"](numel, torch.Generator().manual_seed(SEED))
    found: dict[str, dict[str, int]] = {}
    gc.freeze()  # collections would look through all that was imported, each time
    for density in DENSITIES:
        count = math.ceil(density * numel)
        found[str(density)] = {}
        for name, way in WAYS.items():
            way(values, count)
            gc.collect()
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
            before = _status_bytes("VmRSS")
            way(values, count)
            found[str(density)][name] = _status_bytes("VmHWM") - before
    return found


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def missing(cells: list[dict]) -> Iterator[tuple[int, int, str]]:
    """What has not been measured, the small first."""
    known = {(cell["threads"], cell["numel"], cell["distribution"]) for cell in cells}
    for threads, names in RUNS.items():
        for case in itertools.product((threads,), SIZES, names):
            if case not in known:
                yield case


def load(path: Path) -> dict[str, Any]:
    """What was found before, or nothing."""
    if not path.exists():
        return {"cells": [], "memory": {}}
    return {key: json.loads(path.read_text())[key] for key in ("cells", "memory")}


def measure(found: dict[str, Any], deadline: float) -> Iterator[None]:
    """Measures what is missing, and yields after every cell."""
    for threads, numel, name in [*missing(found["cells"])]:
        if time.monotonic() > deadline:
            return
        torch.set_num_threads(threads)
        order = random.Random(SEED)
        values = DISTRIBUTIONS[name](numel, torch.Generator().manual_seed(SEED))
        cell = {
            "threads": threads,
            "numel": numel,
            "distribution": name,
            "load_average": os.getloadavg()[0],
            "densities": {
                str(density): compare(values, math.ceil(density * numel), order)
                for density in DENSITIES
            },
        }
        found["cells"].append(cell)
        for density, by_way in cell["densities"].items():
            spent = [f"{way} {1e3 * by_way[way]['cpu_seconds_quartiles'][1]:.3g}" for way in WAYS]
            print(f"{threads} {numel:,} {name} {density}: {', '.join(spent)} ms CPU", flush=True)
        yield
    for numel in SIZES:
        if str(numel) in found["memory"] or time.monotonic() > deadline:
            continue
        command = [sys.executable, "-m", "benchmarks.selection", "--peaks", str(numel)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["memory"][str(numel)] = json.loads(output)
        yield


def main() -> None:
    """Measures what is missing, and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--peaks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peaks is not None:
        torch.set_num_threads(1)
        print(json.dumps(peaks(options.peaks)))
        return
    path = RESULTS / "selection.json"
    if options.fresh:
        path.unlink(missing_ok=True)
    found = load(path)
    for _ in measure(found, time.monotonic() + 60 * options.minutes):
        write("selection", {"seed": SEED, **found})
    fill_page()


if __name__ == "__main__":
    main()
