"""What the ring shuffle buys, and what it costs.

Accuracy: shards dealt by label and at random, with the ring and without it, and all data for
everyone. Trains with `gossipgrad train`, the same seeds for all. Cells that are done are kept
between calls.

Cost: steps of LeNet on a shard of Fashion-MNIST, with the ring and without it, in the same
processes, block by block in turns.

    python -m benchmarks.shuffle
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import data, models
from gossipgrad.cli._train import parse
from gossipgrad.train import run as train

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
    "global": ["--shuffle", "global"],
    "ring": ["--shuffle", "ring", "--shards", "by-label"],
    "none": ["--shuffle", "local", "--shards", "by-label"],
    "ring-random": ["--shuffle", "ring", "--shards", "random"],
    "none-random": ["--shuffle", "local", "--shards", "random"],
}


def run(options: list[str], out: Path) -> dict:
    """The summary of one run; from disk if it was done before."""
    summary = out / "summary.json"
    if not summary.exists():
        # In this process: all runs then share one fork server, which has torch loaded.
        train(parse([*options, "--trace", "0", "--quiet", "--out", str(out), "--overwrite"]))
    found = json.loads(summary.read_text())
    if found["interrupted"]:
        raise SystemExit(f"{out} was interrupted: remove it")
    return found


def accuracy(seeds: int, folder: Path) -> list[dict]:
    """One row a task, strategy and shuffle: accuracies by seed."""
    rows = []
    for name, task, world_size, strategy, shuffles in TASKS:
        for shuffle in shuffles:
            command = [*task.split(), "--strategy", strategy, "--nproc", str(world_size)]
            command += SHUFFLES[shuffle]
            slug = "-".join([*task.split()[1:4:2], strategy, shuffle, str(world_size)])
            summaries = [
                run([*command, "--seed", str(seed)], folder / f"{slug}-{seed}")
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
                    "command": "gossipgrad train " + " ".join(command),
                    "accuracy": found,
                    "mean": round(statistics.fmean(found), 4),
                    "standard_deviation": round(statistics.stdev(found), 4),
                    "late_rounds": [s.get("shuffle_late_rounds") for s in summaries],
                    "shuffle_bytes_sent_per_step": summaries[0].get("shuffle_bytes_sent_per_step"),
                    "bytes_sent_per_step": summaries[0]["bytes_sent_per_step"],
                }
            )
            print(name, world_size, strategy, shuffle, found, flush=True)
    return rows


def cost_worker(rank: int, world_size: int, port: int, blocks: int, steps: int, results) -> None:
    """Times blocks of steps, with the ring and without it in turns."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dataset = data.load("fashion-mnist")
    shard = torch.arange(rank * 4096, (rank + 1) * 4096)
    x, y = dataset.train.batch(shard)
    model = models.build("lenet", dataset.info)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times: dict[str, list[float]] = {"plain": [], "ring": []}
    processor: dict[str, list[float]] = {"plain": [], "ring": []}
    with gg.RingShuffle(x, y, batch_size=64) as shuffle:
        sources = {
            "plain": endless(gg.RingShuffle(x, y, batch_size=64, process_group=alone())),
            "ring": endless(shuffle),
        }
        for block in range(-1, blocks):
            for name, source in sources.items():
                taken_seconds = []
                for _ in range(steps):
                    dist.barrier()  # as near to each other as training by gossip keeps them
                    start, busy = time.perf_counter(), time.process_time()
                    inputs, targets = next(source)
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    taken_seconds.append((time.perf_counter() - start, time.process_time() - busy))
                if block >= 0:
                    wall, busy_seconds = zip(*taken_seconds, strict=True)
                    times[name].extend(wall)
                    processor[name].extend(busy_seconds)
        shuffle.drain()
        stats = shuffle.stats()
    taken = (blocks + 1) * steps
    results.put(
        {
            "step_milliseconds": milliseconds(times),
            "processor_milliseconds_per_step": milliseconds(processor),  # of all threads
            "exposed_milliseconds_per_step": round(1e3 * stats.exposed_seconds / taken, 4),
            "moving_milliseconds_per_step": round(1e3 * stats.moving_seconds / taken, 4),
            "bytes_sent_per_step": stats.bytes_sent // taken,
            "late_rounds": stats.late_rounds,
            "rows_stale": stats.rows_stale,
            "steps": stats.steps,
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def milliseconds(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians."""
    return {name: round(1e3 * statistics.median(found), 3) for name, found in seconds.items()}


def alone() -> gg.Group:
    """A group of one: a plain shuffle."""
    return gg.Group(dist.HashStore(), 0, 1)


def endless(shuffle):
    """Epoch after epoch."""
    while True:
        yield from shuffle


def cost(world_size: int, blocks: int, steps: int) -> dict:
    """Figures of rank 0 in one world."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(
            target=cost_worker, args=(rank, world_size, store.port, blocks, steps, results)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    ranks = [results.get() for _ in processes]
    for process in processes:
        process.join()
    medians = [rank["step_milliseconds"] for rank in ranks]
    row = {
        "world_size": world_size,
        "ratio_of_step_times": round(statistics.median(m["ring"] / m["plain"] for m in medians), 3),
        "ranks": ranks,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Runs what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--folder", type=Path, default=Path("runs/shuffle"))
    options = parser.parse_args()
    rows = accuracy(options.seeds, options.folder)
    costs = [cost(p, options.blocks, options.steps) for p in (2, 3, 4)]
    print(write(Path(__file__).stem, {"accuracy": rows, "cost": costs}))


if __name__ == "__main__":
    main()
