"""A training step by gossip against DDP: two processes on loopback, compute-bound models.

Contestants take turns in the same two processes, block by block, so that they share whatever else
the machine does. Each step is timed on rank 0; the ratio is taken block by block.

    python -m benchmarks.step
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import write
from benchmarks._two_ranks import WORLD_SIZE, in_two_processes

CONTESTANTS = ("gossip", "gossip, bf16 wire", "ddp", "no communication")

# What a task is: a function to a model, one to a new batch, and one from model and batch to loss.
Batch = tuple[Tensor, ...]
Task = Callable[[], tuple[nn.Module, Callable[[], Batch], Callable[..., Tensor]]]


class Contestant:
    """One way to keep replicas together, with a model and optimizer of its own."""

    def __init__(self, name: str, task: Task, group: dist.ProcessGroup) -> None:
        self.model, self.batch, self.loss = task()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.session = None
        if name.startswith("gossip"):
            wire = torch.bfloat16 if "bf16" in name else None
            self.session = gg.gossip(
                self.model, self.optimizer, process_group=group, wire_dtype=wire
            )
        elif name == "ddp":
            self.model = DistributedDataParallel(self.model)

    def step(self, batch: Batch) -> float:
        """One step, its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss(self.model, *batch).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def measure(tasks: dict[str, Task], blocks: int, steps: int) -> dict[str, dict]:
    """Medians and quartiles of each contestant, and the ratio to DDP block by block."""
    return _summarise(in_two_processes(_take_turns, tasks, blocks, steps))


def _take_turns(
    group: dist.ProcessGroup, tasks: dict[str, Task], blocks: int, steps: int
) -> dict[str, dict]:
    figures = {}
    for title, task in tasks.items():
        torch.manual_seed(0)
        made = {name: Contestant(name, task, group) for name in CONTESTANTS}
        torch.manual_seed(dist.get_rank())
        times: dict[str, list[list[float]]] = {name: [] for name in made}
        for number in range(blocks + 1):
            for name, contestant in made.items():
                dist.barrier()
                block = [contestant.step(contestant.batch()) for _ in range(steps)]
                if number:  # the first block warms up
                    times[name].append(block)
        own = _own_share(made["gossip"], steps * 2)
        for contestant in made.values():
            contestant.close()
        figures[title] = {"times": times, "own": own}
        dist.barrier()
    return figures


def _own_share(contestant: Contestant, steps: int) -> float:
    """The share of a gossip step spent in gossipgrad's own Python, waiting excluded.

    From a profile: the time of the step hooks, with what they call, less the time in `poll`.
    """
    profile = cProfile.Profile()
    batches = [contestant.batch() for _ in range(steps)]
    dist.barrier()
    profile.enable()
    for batch in batches:
        contestant.step(batch)
    profile.disable()
    total = hooks = waiting = 0.0
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():
        if file == __file__ and name == "step":
            total = cumulative
        elif file.endswith("_session.py") and name in ("_before_step", "_after_step"):
            hooks += cumulative
        elif name == "<method 'poll' of 'zmq.backend.cython._zmq.Socket' objects>" or (
            "zmq" in file and name == "poll"
        ):
            waiting = max(waiting, cumulative)
    assert total, "the profile saw no step"
    return (hooks - waiting) / total


def _summarise(figures: dict) -> dict[str, dict]:
    rows = {}
    for task, held in figures.items():
        medians = {
            name: [statistics.median(block) for block in blocks]
            for name, blocks in held["times"].items()
        }
        rows[task] = {
            name: {
                "step_milliseconds_median": round(1e3 * statistics.median(values), 3),
                "step_milliseconds_quartiles": [
                    round(1e3 * q, 3) for q in statistics.quantiles(values, n=4)
                ],
                "ratio_to_ddp_median": round(
                    statistics.median(a / b for a, b in zip(values, medians["ddp"], strict=True)), 3
                ),
                "ratio_to_ddp_quartiles": [
                    round(q, 3)
                    for q in statistics.quantiles(
                        [a / b for a, b in zip(values, medians["ddp"], strict=True)], n=4
                    )
                ],
            }
            for name, values in medians.items()
        }
        rows[task]["gossip"]["own_python_share_of_step"] = round(held["own"], 4)
    return rows


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that costs nothing."""
    return model(x).square().mean()


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def residual_network() -> tuple[nn.Module, Callable, Callable]:
    """ResNet-20 in width 16-32-64 on 32 x 32 images: 0.27 million parameters."""
    widths = (
        [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    )
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, lambda: (torch.randn(16, 3, 32, 32),), mean_square


class CharacterModel(nn.Module):
    """A GPT of 4 layers, width 256, context 128: 3.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, 256)
        self.place = nn.Parameter(torch.zeros(128, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 65)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x) + self.place, mask, is_causal=True))


def character_model() -> tuple[nn.Module, Callable, Callable]:
    """The model and its batches."""
    return CharacterModel(), lambda: (torch.randint(65, (4, 128)),), mean_square


TASKS = {"ResNet-20": residual_network, "GPT, 4 layers": character_model}


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    options = parser.parse_args()
    rows = measure(TASKS, options.blocks, options.steps)
    for task, row in rows.items():
        print(task)
        for name, value in row.items():
            print(f"  {name:20}", value)
    print(write(Path(__file__).stem, {"world_size": WORLD_SIZE, "threads": 1, "tasks": rows}))


if __name__ == "__main__":
    main()
