"""How even steps are when roots are computed at once, by turns, or in the background.

gg.SOAP (or others, by --only) on a small GPT whose matrices are blocks of 512, on one thread of
compute, so that on two cores one is free for a worker. Contestants train by turns, a window of
steps at a time, with what it left in flight waited for inside the window's time, from equal weights
on equal batches. Reported are, after the first window, the 99th percentile over the median of a
step's wall time, and of the processor time of the training thread alone, which neighbours on the
machine do not enter; the wall and processor time of all; and the training loss at the end.

    python -m benchmarks.second_order_spikes --rounds 2
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import models

EVERY, STALENESS, WINDOW = 10, 5, 20
POLICIES = {
    "synchronous": gg.Synchronous(EVERY),
    "staggered": gg.Staggered(EVERY),
    "background": gg.Background(EVERY, STALENESS),
    "background, fixed delay": gg.Background(EVERY, STALENESS, fixed_delay=True),
}


class Contestant:
    """A model, its optimizer, and what has been measured of its steps."""

    def __init__(self, kind: type, policy: Any, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = models.GPT(65, layers=layers, width=width, heads=8)
        self.optimizer = kind(self.model, lr=1e-3, max_dim=512, refresh=policy)
        self.data = torch.Generator().manual_seed(1)
        self.walls: list[float] = []
        self.threads: list[float] = []
        self.total = self.cpu = self.loss = 0.0

    def step(self, batch: int) -> None:
        # a text to learn: each character is the sum of the two before it
        x = torch.randint(65, (batch, 130), generator=self.data)
        for place in range(2, 130):
            x[:, place] = (x[:, place - 1] + x[:, place - 2]) % 65
        inputs, targets = x[:, 1:-1], x[:, 2:]
        start, thread = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).transpose(1, 2), targets)
        loss.backward()
        self.optimizer.step()
        self.walls.append(time.perf_counter() - start)
        self.threads.append(time.thread_time() - thread)
        self.loss = loss.item()

    def window(self, batch: int, counts: bool) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(WINDOW):
            self.step(batch)
        self.optimizer.refresher.drain()
        if counts:
            self.total += time.perf_counter() - start
            self.cpu += time.process_time() - cpu
        else:
            self.walls.clear()
            self.threads.clear()

    def figures(self) -> dict[str, Any]:
        stats = self.optimizer.refresh_stats
        return {
            "median_ms": 1e3 * statistics.median(self.walls),
            "p99_ms": 1e3 * float(np.percentile(self.walls, 99)),
            "p99_over_median": float(np.percentile(self.walls, 99)) / statistics.median(self.walls),
            "thread_median_ms": 1e3 * statistics.median(self.threads),
            "thread_p99_over_median": float(np.percentile(self.threads, 99))
            / statistics.median(self.threads),
            "wall_seconds": self.total,
            "cpu_seconds": self.cpu,
            "loss": self.loss,
            "refreshes": stats.refreshes,
            "waits": stats.waits,
            "waited_seconds": stats.waited_seconds,
            "oldest": stats.oldest,
            "steps": len(self.walls),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--only", default="SOAP")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in options.only.split(","):
        contestants = {
            policy: Contestant(getattr(gg, name), value, options.layers, options.width)
            for policy, value in POLICIES.items()
        }
        for turn in range(options.rounds + 1):
            for contestant in contestants.values():
                contestant.window(options.batch, counts=turn > 0)
        found[name] = {policy: each.figures() for policy, each in contestants.items()}
        for policy, figures in found[name].items():
            print(name, policy, {key: round(value, 3) for key, value in figures.items()})
        for each in contestants.values():
            each.optimizer.close()
    print(write("second_order_spikes", {"options": vars(options), "figures": found}))


if __name__ == "__main__":
    main()
