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
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from benchmarks._common import write
from benchmarks._processes import in_processes
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
Samples = list[dict[str, int]]


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


def judge(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each measure of one rank and part: mean, growth, what is allowed, whether it is flat."""
    half = samples[len(samples) // 2 :]
    at = [sample["exchanges"] for sample in half]
    found = {}
    for measure, (share, least) in ALLOWED.items():
        values = [sample[measure] for sample in half]
        grew = float(values[-1] - values[0])
        if len(set(at)) > 1:
            grew = statistics.linear_regression(at, values).slope * (max(at) - min(at))
        mean = statistics.fmean(values)
        allowed = max(share * mean, least)
        found[measure] = {
            "mean": round(mean, 1),
            "growth": round(grew, 2),
            "allowed": round(allowed, 2),
            "flat": grew <= allowed,
        }
    return found


def train(world: dist.ProcessGroup, folder: Path, steps: int) -> dict[str, Samples]:
    """All parts, one after the other, on one rank; samples of each."""
    return {name: _part(world, folder / name, steps, *part) for name, part in PARTS.items()}


def _part(
    world: dist.ProcessGroup,
    folder: Path,
    steps: int,
    mode: str,
    topology: str,
    share: float,
    sessions: int,
) -> Samples:
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 4))
    own, samples, before = max(1, round(share * steps / sessions)), [], 0
    every = max(1, own * sessions // SAMPLES)
    for number in range(sessions):
        save_to = folder / str(number)
        with (
            gg.gossip(
                model,
                optimizer,
                topology=topology,
                mode=mode,
                bucket_bytes=BUCKET_BYTES,
                process_group=gg.Group.from_process_group(world),
            ) as session,
            checkpoint.Saver(save_to, rank=rank, world_size=world_size, keep=2) as saver,
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
    """Runs all parts in processes; by part, exchanges and what was found of each rank."""
    with tempfile.TemporaryDirectory(prefix="gossipgrad-soak-") as folder:
        found = in_processes(ranks, train, Path(folder), steps)
    return {
        part: {
            # each counts at both ends
            "exchanges": sum(one[part][-1]["exchanges"] for one in found) // 2,
            "found": {str(rank): judge(one[part]) for rank, one in enumerate(found)},
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
