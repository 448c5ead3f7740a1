"""The largest magnitudes of a tensor: ours, torch's and numpy's ways, in time and memory.

Every way selects from the same values by turns, in an order that changes from turn to turn. All
return int64 indices; ours are in ascending order, the others in none. Values are what error
feedback leaves: per-tensor scales that differ a hundredfold, a fifth of zeros, and the largest of
four steps sent already. Memory is how much more of it the process has at its highest than before
the call, measured on Linux in a process of its own that gives everything back between calls; the
indices that are returned are part of it.

    python -m benchmarks.selection
"""

import argparse
import ctypes
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._common import quartiles, write
from gossipgrad.compression import top_k

SEED = 0
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 25_000_000, 100_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25)
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


def peaks(numel: int) -> dict[str, dict[str, int]]:
    """By density and way, how many bytes more there are at the highest than before."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back
    values = accumulator(numel, torch.Generator().manual_seed(SEED))
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


def main() -> None:
    """Measures all sizes, and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peaks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peaks is not None:
        print(json.dumps(peaks(options.peaks)))
        return
    found: dict[str, Any] = {"cells": [], "memory": {}}
    for numel in SIZES:
        order = random.Random(SEED)
        values = accumulator(numel, torch.Generator().manual_seed(SEED))
        load = os.getloadavg()[0]
        densities = {
            str(density): compare(values, math.ceil(density * numel), order)
            for density in DENSITIES
        }
        cell = {"threads": 1, "numel": numel, "distribution": "accumulator"}
        found["cells"].append({**cell, "load_average": load, "densities": densities})
        for density, by_way in densities.items():
            spent = [f"{way} {1e3 * by_way[way]['cpu_seconds_quartiles'][1]:.3g}" for way in WAYS]
            print(f"{numel:,} {density}: {', '.join(spent)} ms CPU", flush=True)
        command = [sys.executable, "-m", "benchmarks.selection", "--peaks", str(numel)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["memory"][str(numel)] = json.loads(output)
    print(write("selection", {"seed": SEED, **found}))


if __name__ == "__main__":
    main()
