"""Predicted against measured step times: the time model held against the shaped network.

Reads the cells of `python -m benchmarks.network` and predicts each of them twice: from the rate of
the links alone, and from what `gossipgrad probe` measured on the network that the cells are
measured on, one probe a world size and rate (`--probe` takes them; root; where none comes about,
the one of before stays). One figure was set by the cells themselves: the start-up of a hop of
Gloo's ring, where there is no probe. What comes out of the published cells and probes is published,
in docs/simulate_time.md, too; what comes out of others is written beside them.

    python -m benchmarks.simulate_check
    python -m benchmarks.simulate_check --cells mine.json --probe  # mine_simulate_check.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, write
from benchmarks._ends import ends_as_ctrl_c
from benchmarks._simulate_check_page import fill_page
from benchmarks.netlab import NetlabError
from benchmarks.network._cells import read
from benchmarks.network._hosts import Shaped
from benchmarks.network._where import where
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
# Where nothing was probed: what waking a thread for a message takes; and for a hop of Gloo's ring,
# which wakes several, that of those tried with which most cells came out within the goal.
LATENCY_SECONDS, HOP_LATENCY_SECONDS = 2e-4, 9e-4
HOP_LATENCIES_TRIED = (2e-4, 9e-4, 1e-3)
PROBE_SECONDS = 10.0
_PORT = 29700  # one a probe: one that was closed may not be listened on again at once
_DDP_BUCKET_BYTES, _DDP_FIRST_BUCKET_BYTES, _SMALLEST_BUCKET_BYTES = 25 << 20, 1 << 20, 1 << 18
_PROBE_LIMIT_SECONDS = 300.0

Cell = dict[str, Any]
Probes = dict[tuple[int, float], Network]


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


def compare(cells: list[Cell], probes: Probes) -> list[dict]:
    """A row a cell that was measured and is modelled."""
    rows = []
    for cell in cells:
        measured = cell.get("step_seconds_median")
        rough = None if not measured else predicted(cell, from_rate(cell))
        if rough is None or measured is None:
            continue
        probed = probes.get((cell["world_size"], cell["rate_bits_per_second"]))
        exact = None if probed is None else predicted(cell, probed)
        rows.append(
            {
                **{
                    name: cell.get(name)
                    for name in ("contestant", "world_size", "rate_bits_per_second", "profile")
                },
                "time_factor": cell.get("time_factor", 1.0),
                "size_factor": cell.get("size_factor", 1.0),
                "marked": bool(cell.get("marked")),
                "measured_seconds": measured,
                "from_rate_seconds": round(rough, 6),
                "from_rate_error": round(rough / measured - 1, 4),
                "from_probe_seconds": None if exact is None else round(exact, 6),
                "from_probe_error": None if exact is None else round(exact / measured - 1, 4),
            }
        )
    return rows


def not_modelled(cells: list[Cell]) -> list[str]:
    """Contestants that were measured and have no model."""
    measured = dict.fromkeys(c["contestant"] for c in cells if c.get("step_seconds_median"))
    return [name for name in measured if name not in CONTESTANTS and not name.startswith("bare ")]


def summary(rows: list[dict], key: str) -> dict[str, Any]:
    """Of the cells that are not marked: how many are within the goal, and how far off they are."""
    errors = [abs(row[key]) for row in rows if not row["marked"] and row[key] is not None]
    if not errors:
        return {"cells": 0}
    return {
        "cells": len(errors),
        "within_goal": sum(error <= GOAL for error in errors),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": max(errors),
    }


def places(cells: list[Cell]) -> list[tuple[int, float]]:
    """World sizes and rates at which something was measured."""
    measured = [cell for cell in cells if cell.get("step_seconds_median")]
    return sorted({(c["world_size"], c["rate_bits_per_second"]) for c in measured})


def take_probes(asked: list[tuple[int, float]]) -> list[dict]:
    """Runs `gossipgrad probe` on one network for all, shaped and tried out as for the cells.

    A place that cannot be probed is told and left out.
    """
    probes = []
    with Shaped(max((hosts for hosts, _ in asked), default=2)) as network:
        for number, (world_size, rate) in enumerate(asked):
            place = f"{world_size} hosts at {rate / 1e6:g} Mbit/s"
            try:
                network.shape(world_size, rate)
                found = _probe(network, world_size, port=_PORT + number)
            except (NetlabError, RuntimeError) as error:
                print(f"no probe of {place}: {error}", flush=True)
                continue
            probes.append({"rate_bits_per_second": rate, "where": where()} | found)
            print(f"probed {place}", flush=True)
    return probes


def _probe(network: Shaped, world_size: int, port: int) -> dict:
    """What the first hosts measure."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "probe.json"
        command = [sys.executable, "-m", "gossipgrad", "probe", "--seconds", str(PROBE_SECONDS)]
        command += ["--timeout", "60", "--out", str(out)]
        processes, said = [], []
        for host in range(world_size):
            own = {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
            env = os.environ | network.environment(host, port=port) | own
            said.append(stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")))
            process = network.popen(
                host, command, env=env, stdout=subprocess.DEVNULL, stderr=said[-1]
            )
            stack.callback(_end, process)
            processes.append(process)
        deadline = time.monotonic() + _PROBE_LIMIT_SECONDS
        for host, process in enumerate(processes):
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"not done after {_PROBE_LIMIT_SECONDS:g} s") from None
            if code:
                said[host].seek(0)
                raise RuntimeError(f"host {host} ended with {code}: {said[host].read().strip()}")
        return json.loads(out.read_text())


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _held(path: Path) -> dict[tuple[int, float], dict]:
    """The probes of a file by place; none if there is no file.

    Raises:
        ValueError: It holds something else.
    """
    if not path.exists():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))["probes"]
        found = {(one["world_size"], one["rate_bits_per_second"]): one for one in held}
        for one in held:
            Network.from_json(one)
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise ValueError(
            f"{path} holds no probes of `python -m benchmarks.simulate_check --probe`: {error!r}"
        ) from error
    return found


def _add_probes(path: Path, asked: list[tuple[int, float]]) -> None:
    """Takes them and adds them to the file, each in place of an older one of its place."""
    held = _held(path)
    taken = {(one["world_size"], one["rate_bits_per_second"]): one for one in take_probes(asked)}
    for world_size, rate in asked:
        if (world_size, rate) in held.keys() - taken.keys():
            print(f"the probe of before stays: {world_size} hosts at {rate / 1e6:g} Mbit/s")
    if taken:
        both = held | taken
        figures = {"probes": [both[place] for place in sorted(both)]}
        write(path.stem, figures, module="simulate_check", path=path)


def _written(figures: dict, cells: Path, probes: Path) -> Path:
    """Publishes what came out of the published files; of others it is written beside them."""
    ours = {name: RESULTS / f"{name}.json" for name in ("network", "network_probes")}
    for path, published in ((cells, ours["network"]), (probes, ours["network_probes"])):
        if path.resolve() != published.resolve():
            beside = path.with_name(f"{path.stem}_simulate_check.json")
            return write("simulate_check", figures, path=beside)
    fill_page(figures)
    return write("simulate_check", figures)


def main() -> int:
    """Predicts, prints, writes; the exit status says whether there was anything to compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, default=RESULTS / "network.json")
    parser.add_argument(
        "--probes", type=Path, help="by default beside the cells: network_probes.json"
    )
    parser.add_argument("--probe", action="store_true", help="take the probes first; root")
    options = parser.parse_args()
    probes = options.probes or options.cells.with_name(f"{options.cells.stem}_probes.json")
    if not options.cells.exists():
        print(
            f"no {options.cells}: `python -m benchmarks.network` measures the cells",
            file=sys.stderr,
        )
        return 2
    if options.probes and not (options.probe or probes.exists()):
        print(f"no {probes}: --probe takes the probes", file=sys.stderr)
        return 2
    try:
        cells = read(options.cells)
        if options.probe:
            with ends_as_ctrl_c():
                _add_probes(probes, places(cells))
        held = _held(probes)
    except NetlabError as error:
        print(f"no laboratory here: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    rows = compare(cells, {place: Network.from_json(one) for place, one in held.items()})
    for row in rows:
        exact = row["from_probe_error"]
        place = f"{row['profile']:9} {row['rate_bits_per_second'] / 1e6:7g} Mbit/s"
        print(
            f"{place} p={row['world_size']:<3}{row['contestant']:32}"
            f"{1e3 * row['measured_seconds']:8.1f} ms {100 * row['from_rate_error']:+7.1f} %"
            f" {'' if exact is None else f'{100 * exact:+7.1f} %'}{'  marked' * row['marked']}"
        )
    summaries = {key: summary(rows, f"{key}_error") for key in ("from_rate", "from_probe")}
    for key, found in summaries.items():
        print(key, found)
    left_out = not_modelled(cells)
    if left_out:
        print("not modelled:", "; ".join(left_out))
    figures = {
        "goal": GOAL,
        "start_ups": {
            "message_seconds": LATENCY_SECONDS,
            "hop_seconds": HOP_LATENCY_SECONDS,
            "hops_tried_seconds": HOP_LATENCIES_TRIED,
        },
        "summary": summaries,
        "not_modelled": left_out,
        "rows": rows,
    }
    print(_written(figures, options.cells, probes))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
