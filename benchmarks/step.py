"""A training step by gossip against DDP: two processes on loopback, compute-bound models.

Both contestants live in the same two processes and take turns, block by block, so that they share
whatever else the machine does. Each step is timed on rank 0; the ratio is taken block by block.

    python -m benchmarks.step
"""

import argparse
import cProfile
import multiprocessing
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

WORLD_SIZE = 2


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


def residual_network() -> tuple[nn.Module, Callable[[], Tensor]]:
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
    return model, lambda: torch.randn(16, 3, 32, 32)


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


def character_model() -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model and its batches."""
    return CharacterModel(), lambda: torch.randint(65, (4, 128))


TASKS = {"ResNet-20": residual_network, "GPT, 4 layers": character_model}


def contestants(build: Callable, group: dist.ProcessGroup) -> dict[str, tuple]:
    """Each with a model and optimizer of its own: name to (forward, optimizer, batch, close)."""
    made = {}
    torch.manual_seed(0)
    for name in ("gossip", "gossip, bf16 wire", "ddp", "no communication"):
        model, batch = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        session = None
        if name.startswith("gossip"):
            wire = torch.bfloat16 if "bf16" in name else None
            session = gg.gossip(model, optimizer, process_group=group, wire_dtype=wire)
        elif name == "ddp":
            model = DistributedDataParallel(model)
        made[name] = (model, optimizer, batch, session)
    return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> float:
    """One step, its seconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    out = model(inputs)
    out.square().mean().backward()
    optimizer.step()
    return time.perf_counter() - start


def worker(rank: int, port: int, blocks: int, steps: int, results) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    group = dist.group.WORLD
    figures = {}
    for task, build in TASKS.items():
        made = contestants(build, group)
        times: dict[str, list[list[float]]] = {name: [] for name in made}
        for number in range(blocks + 1):
            for name, (model, optimizer, batch, _) in made.items():
                dist.barrier()
                block = [step(model, optimizer, batch()) for _ in range(steps)]
                if number:  # the first block warms up
                    times[name].append(block)
        own = own_share(made["gossip"], steps * 2)
        for *_, session in made.values():
            if session is not None:
                session.close()
        figures[task] = {"times": times, "own": own}
        dist.barrier()
    if rank == 0:
        results.put(figures)
    dist.destroy_process_group()


def own_share(contestant: tuple, steps: int) -> float:
    """The share of a gossip step spent in gossipgrad's own Python, waiting excluded.

    From a profile: the time of the step hooks, with what they call, less the time in `poll`.
    """
    model, optimizer, batch, _ = contestant
    profile = cProfile.Profile()
    inputs = [batch() for _ in range(steps)]
    dist.barrier()
    profile.enable()
    for x in inputs:
        step(model, optimizer, x)
    profile.disable()
    total = hooks = waiting = 0.0
    for (file, _, name), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():
        if file.endswith("step.py") and name == "step":
            total = cumulative
        elif file.endswith("_session.py") and name in ("_before_step", "_after_step"):
            hooks += cumulative
        elif name == "<method 'poll' of 'zmq.backend.cython._zmq.Socket' objects>" or (
            "zmq" in file and name == "poll"
        ):
            waiting = max(waiting, cumulative)
    return (hooks - waiting) / total


def summarise(figures: dict) -> dict:
    """Medians and quartiles a contestant, and the ratio to DDP block by block."""
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


def main() -> None:
    """Starts the processes and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    processes = [
        context.Process(target=worker, args=(rank, port, options.blocks, options.steps, results))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    figures = results.get()
    for process in processes:
        process.join()
    rows = summarise(figures)
    for task, row in rows.items():
        print(task)
        for name, value in row.items():
            print(f"  {name:20}", value)
    print(write(Path(__file__).stem, {"world_size": WORLD_SIZE, "threads": 1, "tasks": rows}))


if __name__ == "__main__":
    main()
