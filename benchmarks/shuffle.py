"""What the ring shuffle buys, and what it costs.

Accuracy: shards dealt by label and at random, with the ring and without it, and all data for
everyone. Trains with `gossipgrad train`, the same seeds for all. Runs that are done are kept.

Cost: steps of LeNet on a shard of Fashion-MNIST, with the ring and without it, in the same
processes, block by block in turns.

    python -m benchmarks.shuffle
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from benchmarks._common import write
from benchmarks._processes import in_processes
from benchmarks._tasks import Part
from benchmarks.accuracy import trained
from gossipgrad import data, models

DIGITS = "--data digits --model mlp --epochs 20"
FASHION = "--data fashion-mnist --model mlp --epochs 8 --batch-size 64 --lr 0.05"
BY_LABEL = ("global", "ring", "none")
TASKS = [
    ("digits, MLP", DIGITS, 4, "gossip", BY_LABEL),
    ("digits, MLP", DIGITS, 8, "gossip", BY_LABEL),
    ("Fashion-MNIST, MLP", FASHION, 4, "gossip", BY_LABEL),
    ("Fashion-MNIST, MLP", FASHION, 8, "gossip", BY_LABEL),
    ("digits, MLP", DIGITS, 4, "local", (*BY_LABEL, "ring-random", "none-random")),
    ("digits, MLP", DIGITS, 8, "local", BY_LABEL),
]
SHUFFLES = {
    "global": "--shuffle global",
    "ring": "--shuffle ring --shards by-label",
    "none": "--shuffle local --shards by-label",
    "ring-random": "--shuffle ring --shards random",
    "none-random": "--shuffle local --shards random",
}
Times = dict[str, list[float]]


def accuracy(seeds: int, folder: Path) -> list[dict]:
    """One row a task, strategy and shuffle: accuracies by seed."""
    rows = []
    for name, task, world_size, strategy, shuffles in TASKS:
        for shuffle in shuffles:
            command = f"{task} --strategy {strategy} --nproc {world_size} {SHUFFLES[shuffle]}"
            slug = "-".join([*task.split()[1:4:2], strategy, shuffle, str(world_size)])
            summaries = [
                trained([*command.split(), "--seed", str(seed)], folder / f"{slug}-{seed}")
                for seed in range(seeds)
            ]
            # Replicas that are on their own are taken together: each is a rank's model.
            found = [statistics.fmean(s["accuracy_per_rank"]) for s in summaries]
            if strategy == "gossip":
                found = [s["accuracy"] for s in summaries]
            rows.append(
                {
                    "task": name,
                    "world_size": world_size,
                    "strategy": strategy,
                    "shuffle": shuffle,
                    "command": f"gossipgrad train {command}",
                    "accuracy": found,
                    "mean": round(statistics.fmean(found), 4),
                    "standard_deviation": round(
                        statistics.pstdev(found) if seeds < 2 else statistics.stdev(found), 4
                    ),
                    "late_rounds": [s.get("shuffle_late_rounds") for s in summaries],
                    "shuffle_bytes_sent_per_step": summaries[0].get("shuffle_bytes_sent_per_step"),
                    "bytes_sent_per_step": summaries[0]["bytes_sent_per_step"],
                }
            )
            print(name, world_size, strategy, shuffle, found, flush=True)
    return rows


def blocks_of_steps(world: dist.ProcessGroup, blocks: int, steps: int) -> dict:
    """Times blocks of steps, with the ring and without it in turns; figures of this rank."""
    rank = dist.get_rank()
    dataset = data.load("fashion-mnist")
    x, y = dataset.train.batch(torch.arange(rank * 4096, (rank + 1) * 4096))
    model = models.build("lenet", dataset.info)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wall: Times = {"plain": [], "ring": []}
    processor: Times = {"plain": [], "ring": []}  # of all threads
    alone = gg.Group(dist.HashStore(), 0, 1)  # of one rank: a plain shuffle
    with gg.RingShuffle(x, y, batch_size=64) as shuffle:
        plain = gg.RingShuffle(x, y, batch_size=64, process_group=alone)
        sources = {"plain": endless(plain), "ring": endless(shuffle)}
        for block in range(-1, blocks):
            for name, source in sources.items():
                for _ in range(steps):
                    dist.barrier()  # as near to each other as training by gossip keeps them
                    start, busy = time.perf_counter(), time.process_time()
                    inputs, targets = next(source)
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if block >= 0:  # the first one warms up
                        wall[name].append(time.perf_counter() - start)
                        processor[name].append(time.process_time() - busy)
        shuffle.drain()
        stats = shuffle.stats()
    taken = (blocks + 1) * steps
    return {
        "step_milliseconds": milliseconds(wall),
        "processor_milliseconds_per_step": milliseconds(processor),
        "exposed_milliseconds_per_step": round(1e3 * stats.exposed_seconds / taken, 4),
        "moving_milliseconds_per_step": round(1e3 * stats.moving_seconds / taken, 4),
        "bytes_sent_per_step": stats.bytes_sent // taken,
        "late_rounds": stats.late_rounds,
    }


def milliseconds(seconds: Times) -> dict[str, float]:
    """Medians."""
    return {name: round(1e3 * statistics.median(found), 3) for name, found in seconds.items()}


def endless(shuffle: Iterable[Part]) -> Iterator[Part]:
    """Epoch after epoch."""
    while True:
        yield from shuffle


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--folder", type=Path, default=Path("runs/shuffle"))
    options = parser.parse_args()
    rows, costs = accuracy(options.seeds, options.folder), []
    for p in (2, 3, 4):
        ranks = in_processes(p, blocks_of_steps, options.blocks, options.steps)
        ratios = [r["step_milliseconds"]["ring"] / r["step_milliseconds"]["plain"] for r in ranks]
        ratio = round(statistics.median(ratios), 3)
        costs.append({"world_size": p, "ratio_of_step_times": ratio, "ranks": ranks})
        print(costs[-1], flush=True)
    print(write("shuffle", {"accuracy": rows, "cost": costs}))


if __name__ == "__main__":
    main()
