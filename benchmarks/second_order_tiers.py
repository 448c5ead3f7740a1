"""What a device budget of 30 % of an optimizer's state costs, and whether it holds.

gg.SOAP on a small GPT, without limits and with `Tiers(device_bytes=...)` of a share of the state
and the rest on disk: by turns, from equal weights on equal batches. On a CPU the device is host
memory, so what is on disk is what the process does not hold. Reported are the bytes of the state,
the most that was resident at a time, the time of a step in both, how often the prefetching thread
had loaded before the step asked, whether weights are equal bit for bit, and the resident memory of
a process of its own that trains the one or the other.

    python -m benchmarks.second_order_tiers
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import models

MODULE = "benchmarks.second_order_tiers"


def build(storage: gg.Tiers | None, layers: int, width: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = models.GPT(65, layers=layers, width=width)
    optimizer = gg.SOAP(model, lr=1e-3, max_dim=512, refresh=gg.Staggered(10), storage=storage)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any, data: torch.Generator) -> float:
    x = torch.randint(65, (2, 65), generator=data)
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]).backward()
    optimizer.step()
    return time.perf_counter() - start


def resident_bytes() -> int:
    """Of this process, without what is mapped from files."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", text)[1])


def alone(budget: int, disk: str, layers: int, width: int) -> None:
    """One process: prints how much its resident memory has grown with the optimizer's state."""
    storage = gg.Tiers(device_bytes=budget, disk=disk) if budget else None
    model, optimizer = build(storage, layers, width)
    data = torch.Generator().manual_seed(1)
    x = torch.randint(65, (2, 65), generator=data)
    for _ in range(2):
        F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]).backward()
    before = resident_bytes()
    for _ in range(6):
        step(model, optimizer, data)
    print(resident_bytes() - before)
    optimizer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    of = options.layers, options.width
    if options.alone is not None:
        alone(options.alone, options.disk, *of)
        return
    model, optimizer = build(None, *of)
    data = torch.Generator().manual_seed(1)
    step(model, optimizer, data)
    step(model, optimizer, data)  # bases come with the second
    state_bytes = optimizer.storage_stats.device_bytes
    budget = int(options.share * state_bytes)
    tiers = gg.Tiers(device_bytes=budget, disk=options.disk)
    other, tiered = build(tiers, *of)
    again = torch.Generator().manual_seed(1)
    step(other, tiered, again)
    step(other, tiered, again)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.steps):
        times[0].append(step(model, optimizer, data))
        times[1].append(step(other, tiered, again))
    is_equal = all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    stats = tiered.storage_stats
    grown = [
        int(
            subprocess.run(
                [sys.executable, "-m", MODULE, *sys.argv[1:], "--alone", str(size)],
                check=True,
                capture_output=True,
                env=os.environ,
                text=True,
            ).stdout
        )
        for size in (0, budget)
    ]
    found = {
        "state_bytes": state_bytes,
        "budget_bytes": budget,
        "highest_resident_bytes": stats.highest_device_bytes,
        "on_disk_bytes": stats.disk_bytes,
        "process_grew_bytes": {"unlimited": grown[0], "tiers": grown[1]},
        "equal_bit_for_bit": is_equal,
        "median_step_ms": {
            "unlimited": 1e3 * statistics.median(times[0]),
            "tiers": 1e3 * statistics.median(times[1]),
        },
        "median_slow_down": statistics.median(b / a for a, b in zip(*times, strict=True)),
        "loads_in_the_step": stats.loads,
        "loads_ahead": stats.prefetched,
        "written_bytes_a_step": stats.written_bytes / (options.steps + 2),
        "read_bytes_a_step": stats.read_bytes / (options.steps + 2),
    }
    optimizer.close()
    tiered.close()
    print(found)
    shown = {key: value for key, value in vars(options).items() if key != "disk"}
    print(write("second_order_tiers", {"options": shown, **found}))


if __name__ == "__main__":
    main()
