"""Hundreds of thousands of exchanges over real links, and whether anything grows with them.

Four processes train a tiny model by gossip over ZeroMQ on loopback, with signs of life, a consensus
and a checkpoint now and then: in mode overlap, in mode stale, and in many sessions one after the
other. Memory, open handles, threads and the blocks of Python's allocator, which hold every small
object there is, are looked at all the while. Over the second half of each part they must be flat:
the line of least squares may rise by what `ALLOWED` says.

    python -m benchmarks.soak                # about 45 minutes
    python -m benchmarks.soak --steps 2000   # a short one; writes nothing
"""

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import checkpoint

RANKS, STEPS, SAMPLES, BUCKET_BYTES = 4, 150_000, 120, 128
CONSENSUS_EVERY, SAVE_EVERY, LAST_SAVE_SECONDS = 1_000, 2_500, 60.0
# mode, topology, share of all steps, sessions one after the other
PARTS = {
    "overlap": ("overlap", "dissemination", 0.49, 1),
    "stale": ("stale", "matching", 0.49, 1),
    "sessions": ("sync", "hypercube", 0.02, 100),
}
# What may be gained over the second half: a share of the mean, or so much, whichever is more.
ALLOWED = {
    "rss_bytes": (0.01, 1 << 20),
    "handles": (0.0, 0.5),
    "threads": (0.0, 0.5),
    "blocks": (0.005, 0.0),
}


def sizes() -> dict[str, int]:
    """Of this process, now."""
    gc.collect()  # a session that is over is a circle of objects
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    status = Path("/proc/self/status").read_text()
    return {
        "rss_bytes": pages * resource.getpagesize(),
        "handles": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,  # less the one that looks
        "threads": int(status.split("Threads:")[1].split()[0]),
        "blocks": sys.getallocatedblocks(),
    }


def growth(at: Sequence[float], values: Sequence[float]) -> float:
    """What the line of least squares through some values rises by.

    Example:
        >>> growth([0, 1, 2, 3], [5, 6, 7, 8]), growth([0, 1, 2, 3], [5, 7, 5, 7])
        (3.0, 1.2)
    """
    middle, mean = fmean(at), fmean(values)
    spread = sum((x - middle) ** 2 for x in at)
    if not spread:  # nothing was exchanged between the samples
        return float(values[-1] - values[0])
    slope = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread
    return slope * (max(at) - min(at))


def judge(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each measure of one rank and part: mean, growth, what is allowed, whether it is flat."""
    half = samples[len(samples) // 2 :]
    at = [sample["exchanges"] for sample in half]
    found = {}
    for measure, (share, least) in ALLOWED.items():
        values = [sample[measure] for sample in half]
        mean, grew = fmean(values), growth(at, values)
        allowed = max(share * mean, least)
        found[measure] = {
            "mean": round(mean, 1),
            "growth": round(grew, 2),
            "allowed": round(allowed, 2),
            "flat": grew <= allowed,
        }
    return found


def rank_main(rank: int, world_size: int, port: int, folder: Path, steps: int) -> None:
    """All parts, one after the other; samples go into the folder."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    found = {
        name: _run(name, rank, world_size, store, folder / name, steps, *part)
        for name, part in PARTS.items()
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def _run(
    name: str,
    rank: int,
    world_size: int,
    store: dist.Store,
    folder: Path,
    steps: int,
    mode: str,
    topology: str,
    share: float,
    sessions: int,
) -> list[dict[str, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 4))
    own, samples, before = max(1, round(share * steps / sessions)), [], 0
    every = max(1, own * sessions // SAMPLES)
    for number in range(sessions):
        group = gg.Group(dist.PrefixStore(f"{name}/{number}", store), rank, world_size)
        with (
            gg.gossip(
                model,
                optimizer,
                topology=topology,
                mode=mode,
                bucket_bytes=BUCKET_BYTES,
                process_group=group,
            ) as session,
            checkpoint.Saver(
                folder / str(number), rank=rank, world_size=world_size, keep=2
            ) as saver,
        ):
            for step in range(1, own + 1):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % CONSENSUS_EVERY == 0:
                    with session.consensus():
                        pass
                if step % SAVE_EVERY == 0 or step == own:
                    state = session.state_dict(drain=True)
                    saver.save(state, step=step, wait_seconds=LAST_SAVE_SECONDS, copy=False)
                    del state
                if step == own or (sessions == 1 and step % every == 0):
                    delivered = before + session.stats().outcomes["delivered"]
                    samples.append({"exchanges": delivered, **sizes()})
            before = samples[-1]["exchanges"]
            session.group.barrier()  # one that has left would be missed by who is still to save
    return samples


def run(steps: int, ranks: int = RANKS) -> dict[str, dict[str, Any]]:
    """Runs all parts in processes; by part, exchanges and what was found of each rank.

    Raises:
        RuntimeError: A rank failed.
    """
    # torch asks for the name of whoever connects, and a resolver may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="gossipgrad-soak-") as name:
        folder = Path(name)
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, store.port, folder, steps))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for rank, process in enumerate(processes):
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}")
        finally:
            for process in processes:
                process.kill()
        told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {
        part: {
            # each counts at both ends
            "exchanges": sum(one[part][-1]["exchanges"] for one in told) // 2,
            "found": {str(rank): judge(one[part]) for rank, one in enumerate(told)},
        }
        for part in PARTS
    }


def growing(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is not flat, in words."""
    return [
        f"{part}: rank {rank}: {measure} grew by {found['growth']:,.1f} "
        f"(allowed {found['allowed']:,.1f}) at {found['mean']:,.1f}"
        for part, of in parts.items()
        for rank, measures in of["found"].items()
        for measure, found in measures.items()
        if not found["flat"]
    ]


def main() -> int:
    """Runs it and writes it down; the exit status tells whether anything grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of each rank, in all parts")
    options = parser.parse_args()
    parts = run(options.steps)
    total = sum(part["exchanges"] for part in parts.values())
    for name, part in parts.items():
        print(name, f"{part['exchanges']:,} exchanges", part["found"]["0"])
    if options.steps >= STEPS:
        print(write("soak", {"ranks": RANKS, "exchanges": total, "parts": parts}))
    for line in growing(parts):
        print(line, file=sys.stderr)
    return int(bool(growing(parts)))


if __name__ == "__main__":
    sys.exit(main())
