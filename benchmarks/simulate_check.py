"""Predicted against measured step times: the time model held against the shaped network.

Reads the cells of `python -m benchmarks.network` and predicts each from the rate of the links. One
figure was set by the cells themselves: the start-up of a hop of Gloo's ring.

    python -m benchmarks.simulate_check
    python -m benchmarks.simulate_check --cells mine.json  # mine_simulate_check.json
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, write
from benchmarks.network._cells import Cell, read
from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import (
    AllReduce,
    Gossip,
    Local,
    Network,
    PeriodicAverage,
    Strategy,
    predict,
)

GOAL = 0.1
PAYLOAD_SHARE = (1500 - 52) / (1500 + 14)  # of a full Ethernet frame, what TCP hands on
# What waking a thread for a message takes; and for a hop of Gloo's ring,
# which wakes several, that of those tried with which most cells came out within the goal.
LATENCY_SECONDS, HOP_LATENCY_SECONDS = 2e-4, 9e-4
HOP_LATENCIES_TRIED = (2e-4, 9e-4, 1e-3)
_DDP_BUCKET_BYTES, _DDP_FIRST_BUCKET_BYTES, _SMALLEST_BUCKET_BYTES = 25 << 20, 1 << 20, 1 << 18


def bucket_bytes(full_size: int, cell: Cell) -> int:
    """A bucket as the laboratory cuts it to the size of its profiles."""
    return max(_SMALLEST_BUCKET_BYTES, round(full_size * cell.get("size_factor", 1.0)))


def _ddp(cell: Cell, **options: Any) -> AllReduce:
    first = max(1, round(_DDP_FIRST_BUCKET_BYTES * cell.get("size_factor", 1.0)))
    size = bucket_bytes(_DDP_BUCKET_BYTES, cell)
    return AllReduce(bucket_bytes=size, first_bucket_bytes=first, **options)


def _decent(cell: Cell, topology: str) -> Gossip:
    # Overlapped over the whole step with one partner, as gossip is; larger messages.
    return Gossip(topology=topology, bucket_bytes=bucket_bytes(_DDP_BUCKET_BYTES, cell))


# What is not here is not modelled: PowerSGD computes more than it sends.
CONTESTANTS: dict[str, Callable[[Cell], Strategy]] = {
    "no communication": lambda cell: Local(),
    # gossip() has buckets of its own default size there, not scaled with the profile.
    "gossip": lambda cell: Gossip(),
    "gossip, sync": lambda cell: Gossip(mode="sync"),
    "gossip, bf16 wire": lambda cell: Gossip(element_bytes=2),
    "gossip, state": lambda cell: Gossip(state_every=1, state_copies=1),
    "gossip, state every 4": lambda cell: Gossip(state_every=4, state_copies=1),
    "ddp": _ddp,
    "ddp, fp16 hook": lambda cell: _ddp(cell, element_bytes=2),
    "agd": lambda cell: AllReduce(buckets="layer"),
    "local SGD, period 8": lambda cell: PeriodicAverage(every=8, bucket_bytes=1 << 40),
    "Decent-DP, ring": lambda cell: _decent(cell, "ring"),
    "Decent-DP, one-peer exponential": lambda cell: _decent(cell, "hypercube"),
}


def from_rate(cell: Cell) -> Network:
    """The network by the rate of its links alone."""
    rate = cell["rate_bits_per_second"] * PAYLOAD_SHARE
    exchange, hop = (
        AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=latency)
        for latency in (LATENCY_SECONDS, HOP_LATENCY_SECONDS)
    )
    return Network(exchange=exchange, hop=hop)


def predicted(cell: Cell, network: Network) -> float | None:
    """Step seconds by the model, None for a contestant that is not modelled."""
    make = CONTESTANTS.get(cell["contestant"])
    if make is None:
        return None
    profile = Profile.load(cell["profile"]).scaled(
        time=cell.get("time_factor", 1.0), size=cell.get("size_factor", 1.0)
    )
    found = predict(profile, network, make(cell), world_size=cell["world_size"], steps=48)
    return found.step_seconds


def row(cell: Cell) -> dict[str, Any] | None:
    """Of a cell that was measured and is modelled."""
    measured = cell.get("step_seconds_median")
    rough = predicted(cell, from_rate(cell)) if measured else None
    if rough is None or measured is None:
        return None
    named = ("contestant", "world_size", "rate_bits_per_second", "profile")
    return {
        **{name: cell.get(name) for name in (*named, "time_factor", "size_factor")},
        "marked": bool(cell["marks"]),
        "measured_seconds": measured,
        "from_rate_seconds": round(rough, 6),
        "from_rate_error": round(rough / measured - 1, 4),
    }


def summary(rows: list[dict]) -> dict[str, Any]:
    """Of the cells that are not marked: how many are within the goal, and how far off they are."""
    errors = [abs(one["from_rate_error"]) for one in rows if not one["marked"]]
    if not errors:
        return {"cells": 0}
    return {
        "cells": len(errors),
        "within_goal": sum(error <= GOAL for error in errors),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": max(errors),
    }


def main() -> int:
    """Predicts, prints, writes; the exit status says whether there was anything to compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, default=RESULTS / "network.json")
    options = parser.parse_args()
    try:
        cells = read(options.cells)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [found for found in map(row, cells) if found is not None]
    for one in rows:
        place = f"{one['profile']:9} {one['rate_bits_per_second'] / 1e6:7g} Mbit/s"
        print(
            f"{place} p={one['world_size']:<3}{one['contestant']:32}"
            f"{1e3 * one['measured_seconds']:8.1f} ms {100 * one['from_rate_error']:+7.1f} %"
            f"{'  marked' * one['marked']}"
        )
    measured = dict.fromkeys(c["contestant"] for c in cells if c.get("step_seconds_median"))
    figures = {
        "goal": GOAL,
        "start_ups": {
            "message_seconds": LATENCY_SECONDS,
            "hop_seconds": HOP_LATENCY_SECONDS,
            "hops_tried_seconds": HOP_LATENCIES_TRIED,
        },
        "summary": {"from_rate": summary(rows)},
        "not_modelled": [
            name for name in measured if name not in CONTESTANTS and not name.startswith("bare ")
        ],
        "rows": rows,
    }
    print(figures["summary"], "not modelled:", figures["not_modelled"])
    is_published = options.cells.resolve() == (RESULTS / "network.json").resolve()
    beside = options.cells.with_name(f"{options.cells.stem}_simulate_check.json")
    print(write("simulate_check", figures, path=None if is_published else beside))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
