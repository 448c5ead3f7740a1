"""Hundreds of thousands of exchanges over real links, and whether anything grows with them.

Four processes train a tiny model by gossip on loopback, with a consensus and a copy of the state
now and then: in mode overlap, in mode stale, and in many sessions one after the other. Memory, open
handles, threads and the blocks of Python's allocator must be flat over the second half of each
part: the line of least squares may rise by what `ALLOWED` says.
"""

import gc
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossipgrad as gg
from benchmarks._common import RESULTS, in_processes, memory_bytes, write

RANKS, SAMPLES, BUCKET_BYTES, CONSENSUS_EVERY = 4, 120, 128, 1_000
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
    return {
        "rss_bytes": memory_bytes(),
        "handles": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,  # less the one that looks
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
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
        figures = {"mean": mean, "growth": grew, "allowed": allowed}
        found[measure] = {name: round(value, 2) for name, value in figures.items()}
        found[measure]["is_flat"] = grew <= allowed
    return found


def train(world: Any, steps: int) -> dict[str, list[dict[str, int]]]:
    """All parts, one after the other, on one rank; samples of each."""
    return {name: _part(world, steps, *part) for name, part in PARTS.items()}


def _part(
    world: Any, steps: int, mode: str, topology: str, share: float, sessions: int
) -> list[dict[str, int]]:
    torch.manual_seed(0)
    sessions = min(sessions, max(1, steps // 200))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(world.rank())
    x, y = (torch.randn(4, size, generator=generator) for size in (8, 4))
    own, samples, before = max(1, round(share * steps / sessions)), [], 0
    every = max(1, own * sessions // SAMPLES)
    for _ in range(sessions):
        options = {"topology": topology, "mode": mode, "bucket_bytes": BUCKET_BYTES}
        with gg.gossip(model, optimizer, process_group=world, **options) as session:
            for step in range(1, own + 1):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % CONSENSUS_EVERY == 0:
                    with session.consensus():
                        model(x)
                    session.state_dict()
                if step == own or (sessions == 1 and step % every == 0):
                    delivered = before + session.stats().outcomes["delivered"]
                    samples.append({"exchanges": delivered, **sizes()})
            before = samples[-1]["exchanges"]
            session.average_()  # all have taken their steps
    return samples


def soak(steps: int) -> int:
    """Runs all parts, prints and writes what was found; how many measures grow."""
    ranks = in_processes(RANKS, train, steps)
    parts: dict[str, dict[str, Any]] = {}
    growing = []
    for name in PARTS:
        found = {str(rank): judge(one[name]) for rank, one in enumerate(ranks)}
        # each exchange counts at both ends
        exchanges = sum(one[name][-1]["exchanges"] for one in ranks) // 2
        parts[name] = {"exchanges": exchanges, "found": found}
        print(name, f"{exchanges:,} exchanges", found["0"], flush=True)
        growing += [
            f"{name}: rank {rank}: {measure} grew by {figures['growth']:,.1f}"
            for rank, measures in found.items()
            for measure, figures in measures.items()
            if not figures["is_flat"]
        ]
    print("\n".join(growing) or "nothing grows")
    total = sum(part["exchanges"] for part in parts.values())
    path = RESULTS / ("soak.json" if steps >= 100_000 else "raw/soak.json")
    figures = {"seed": 0, "ranks": RANKS, "exchanges": total, "parts": parts}
    print(write("soak", figures, module="chaos", path=path))
    return len(growing)
