"""A training step by gossip against DDP: two processes on loopback, compute-bound models.

Contestants take turns in the same two processes, block by block, so that they share whatever else
the machine does. Each step is timed on rank 0; the ratio is taken block by block.

    python -m benchmarks.step
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import quartiles, write
from benchmarks._processes import in_processes
from gossipgrad.models import GPT, ResNet20

WORLD_SIZE = 2
CONTESTANTS = ("gossip", "gossip, bf16 wire", "ddp", "no communication")
# A model, and its batches.
TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-20": (lambda: ResNet20(10), lambda: torch.randn(16, 3, 32, 32)),
    # 3.2 million parameters
    "GPT, 4 layers": (
        lambda: GPT(65, context=128, layers=4, width=256, heads=4),
        lambda: torch.randint(65, (4, 128)),
    ),
}


class Contestant:
    """One way to keep replicas together, with a model and optimizer of its own."""

    def __init__(self, name: str, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.session = None
        if name.startswith("gossip"):
            wire = torch.bfloat16 if "bf16" in name else None
            self.session = gg.gossip(model, self.optimizer, process_group=group, wire_dtype=wire)
        elif name == "ddp":
            self.model = DistributedDataParallel(model)

    def step(self, batch: Tensor) -> float:
        """One step, its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()  # a loss that costs nothing
        self.optimizer.step()
        return time.perf_counter() - start


def take_turns(group: dist.ProcessGroup, blocks: int, steps: int) -> dict[str, dict]:
    """By task and contestant, the median step of each block, on one rank."""
    figures = {}
    for title, (model, batch) in TASKS.items():
        made = {}
        for name in CONTESTANTS:
            torch.manual_seed(0)
            made[name] = Contestant(name, model(), group)
        torch.manual_seed(dist.get_rank())
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(blocks + 1):
            for name, contestant in made.items():
                dist.barrier()
                block = [contestant.step(batch()) for _ in range(steps)]
                if number:  # the first block warms up
                    times[name].append(statistics.median(block))
        for contestant in made.values():
            if contestant.session is not None:
                contestant.session.close()
        figures[title] = times
        dist.barrier()
    return figures


def summary(times: dict[str, list[float]]) -> dict[str, dict]:
    """Median and quartiles of each contestant, and of the ratio to DDP block by block."""
    rows = {}
    for name, seconds in times.items():
        spread = [round(q, 3) for q in quartiles(seconds, 1e3)]
        ratios = [a / b for a, b in zip(seconds, times["ddp"], strict=True)]
        ratio = [round(q, 3) for q in quartiles(ratios)]
        rows[name] = {
            "step_milliseconds_median": spread[1],
            "step_milliseconds_quartiles": spread,
            "ratio_to_ddp_median": ratio[1],
            "ratio_to_ddp_quartiles": ratio,
        }
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    options = parser.parse_args()
    first, _ = in_processes(WORLD_SIZE, take_turns, options.blocks, options.steps)
    rows = {task: summary(times) for task, times in first.items()}
    for task, row in rows.items():
        for name, value in row.items():
            print(f"{task:14} {name:20}", value)
    print(write("step", {"world_size": WORLD_SIZE, "threads": 1, "tasks": rows}))


if __name__ == "__main__":
    main()
