"""Step time and processor time of this checkout beside another one, on the same shaped links.

Both have workers on every host of one network; blocks of steps alternate (before, after, after,
before, ...), so that other work on the machine falls on both. Needs Linux and root. A cell is a
world size and a rate; cells of the file that are not measured now stay in it.

    git worktree add ../before COMMIT
    python -m benchmarks.before_after --before ../before
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, made_by
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError
from benchmarks.network._grid import Budget
from benchmarks.network._hosts import Shaped
from benchmarks.network._laboratory import ROOT, Laboratory, WorkerError
from gossipgrad.train._summary import machine, write_json

NAMES = ("overlap", "overlap, bf16 wire", "stale", "sparsify")
ALONE = "no communication"
SIDES = ("before", "after")
BOUNDS = {"step_seconds": 1.02, "cpu_seconds": 0.9}
_SIZE_FACTOR = 0.03  # as in benchmarks.network: 3 MB a rank, which two cores can move
_WARM_UP, _FIRST_STEPS = 2, 4
_TIMEOUT_SECONDS = 240.0
_SPREAD = 0.1  # of the compute, within which ranks begin that need not be in step
_DRAWS = 4000
_TRIES = 3

Figures = dict[str, list[float]]


class Checkout(Laboratory):
    """Workers that run another checkout's gossipgrad and benchmarks."""

    worker = "benchmarks._before_after_worker"

    def __init__(self, network: Shaped, hosts: int, root: Path, first_port: int) -> None:
        self.root = root
        super().__init__(network, hosts)
        self._ports = first_port  # both sides listen on the first host

    def _environment(self, host: int) -> dict[str, str]:
        # `benchmarks` is a namespace package: what the checkout lacks, the worker, is found here.
        path = os.pathsep.join(map(str, (self.root / "src", self.root, ROOT)))
        return {**super()._environment(host), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def join(self, world_size: int) -> None:
        """Makes the process group, on the right code."""
        super().join(world_size)
        for origin in self._everyone("origin", (), 60.0):
            if not Path(origin).is_relative_to(self.root):
                raise WorkerError(f"workers of {self.root} run {origin}")


def main() -> int:
    """Measures the cells, writes them, prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e8, 1e9], help="bit/s")
    parser.add_argument("--blocks", type=int, default=5, help="of each side")
    parser.add_argument("--steps", type=int, default=4, help="of a block that are counted")
    parser.add_argument("--time-factor", type=float, default=2.0, help="of the replayed compute")
    parser.add_argument("--minutes", type=float, help="end after so long; whole blocks stay")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--out", type=Path, default=RESULTS / "before_after.json")
    options = parser.parse_args()
    roots = {"before": options.before.resolve(), "after": ROOT}
    if not (roots["before"] / "src/gossipgrad").is_dir():
        parser.error(f"--before {options.before}: no checkout of gossipgrad")
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    try:
        with ends_as_ctrl_c():
            cells = _measure(options, roots, deadline)
    except (NetlabError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2
    for cell in cells:
        _print(cell)
    return 0


def _measure(
    options: argparse.Namespace, roots: dict[str, Path], deadline: float | None
) -> list[dict[str, Any]]:
    budget = Budget(profile="resnet50", time_factor=options.time_factor, size_factor=_SIZE_FACTOR)
    profile = budget.scaled()
    done: list[dict[str, Any]] = []
    made = made_by("before_after")  # its command as it reads from this checkout
    nearby = os.path.relpath(roots["before"], ROOT)
    made["command"] = made["command"].replace(str(options.before), nearby)
    hosts = max(options.world_sizes)
    with (
        Shaped(hosts) as network,
        Checkout(network, hosts, roots["before"], 0) as before,
        Checkout(network, hosts, roots["after"], 1000) as after,
    ):
        sides = {"before": before, "after": after}
        commits = {side: _commit(root) for side, root in roots.items()}
        for world_size in options.world_sizes:
            for laboratory in sides.values():
                laboratory.join(world_size)
            before.set_rate(None)
            for name in (ALONE, *NAMES):
                for side, laboratory in sides.items():
                    if name != ALONE or side == "after":
                        laboratory.make(name, profile.to_json(), budget.size_factor)
                        laboratory.settle(name, _FIRST_STEPS, _TIMEOUT_SECONDS)
            for rate in options.rates:
                if deadline is not None and time.monotonic() > deadline:
                    print("the time is over: cells are missing", file=sys.stderr)
                    return done
                rate_off = _shape(before, world_size, rate)
                figures, loads = _blocks(sides, options, profile.compute_seconds, deadline)
                cell = {
                    "world_size": world_size,
                    "rate_bits_per_second": rate,
                    "budget": str(budget),
                    "compute_seconds": profile.compute_seconds,
                    "steps_per_block": options.steps,
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    **made,
                    "commits": commits,
                    "seed": options.seed,
                    "rate_off": rate_off,
                    "load_average": {"least": min(loads), "most": max(loads)},
                    "contestants": _compared(figures, options.seed),
                }
                done.append(cell)
                _write(options.out, cell)
            for laboratory in sides.values():
                laboratory.leave()
    return done


def _shape(laboratory: Checkout, world_size: int, rate: float) -> str | None:
    """Sets the rate; why links did not keep to it when tried, None if they did.

    On a busy machine they may not. Both sides meet the same links, so the ratio is measured still.
    """
    if refusal := laboratory.refusal(world_size, rate):
        raise NetlabError(refusal)
    error = None
    for _ in range(_TRIES):
        try:
            laboratory.set_rate(rate)
            return None
        except NetlabError as tried:
            error = str(tried)
    return error


def _blocks(
    sides: dict[str, Checkout], options: argparse.Namespace, compute: float, deadline: float | None
) -> tuple[dict[tuple[str, str], Figures], list[float]]:
    """Seconds of a step and processor seconds of all ranks a step, by contestant and side."""
    figures: dict[tuple[str, str], Figures] = {}
    loads: list[float] = []

    def run(name: str, side: str) -> None:
        spread = 0.0 if name == "sparsify" else _SPREAD * compute
        block = sides[side].run(
            name, _WARM_UP, options.steps, _TIMEOUT_SECONDS, spread_seconds=spread
        )
        of = figures.setdefault((name, side), {"step_seconds": [], "cpu_seconds": []})
        of["step_seconds"].append(block["seconds"])
        of["cpu_seconds"].append(block["cpu_seconds"])

    for number in range(options.blocks):
        if number and deadline is not None and time.monotonic() > deadline:
            print(f"the time is over after {number} blocks of a cell", file=sys.stderr)
            break
        loads.append(os.getloadavg()[0])
        run(ALONE, "after")
        for name in NAMES:
            for side in SIDES[:: 1 if number % 2 == 0 else -1]:
                run(name, side)
    return figures, loads


def _compared(figures: dict[tuple[str, str], Figures], seed: int) -> dict[str, Any]:
    """Medians, spreads and ratios; the replay's own processor time is also taken off."""
    alone = figures[ALONE, "after"]
    found: dict[str, Any] = {ALONE: {what: _spread(alone[what]) for what in BOUNDS}}
    for name in NAMES:
        before, after = (figures[name, side] for side in SIDES)
        of: dict[str, Any] = {}
        for what in BOUNDS:
            of[what] = {"before": _spread(before[what]), "after": _spread(after[what])}
            of[what]["ratio"] = _ratio(before[what], after[what], statistics.median, seed)
        replay = statistics.median(alone["cpu_seconds"])

        def own(values: list[float], replay: float = replay) -> float:
            return statistics.median(values) - replay

        of["cpu_seconds"]["ratio_without_replay"] = _ratio(
            before["cpu_seconds"], after["cpu_seconds"], own, seed
        )
        found[name] = of
    return found


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": _short(statistics.median(values)), "blocks": [_short(v) for v in values]}


def _ratio(
    before: list[float], after: list[float], middle: Callable[[list[float]], float], seed: int
) -> dict[str, Any]:
    """Of the middles, with an interval of 95 % from pairs of blocks drawn again."""
    draw, pairs = random.Random(seed), list(zip(before, after, strict=True))
    drawn = []
    for _ in range(_DRAWS):
        some = draw.choices(pairs, k=len(pairs))
        drawn.append(middle([b for _, b in some]) / middle([a for a, _ in some]))
    drawn.sort()
    interval = [_short(drawn[int(share * (_DRAWS - 1))]) for share in (0.025, 0.975)]
    return {"value": _short(middle(after) / middle(before)), "interval": interval}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _commit(root: Path) -> str:
    command = ["git", "describe", "--always", "--abbrev=10", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def _write(path: Path, cell: dict[str, Any]) -> None:
    """Puts a cell in the place of an older one of the same world size and rate."""
    place = ("world_size", "rate_bits_per_second")
    old = json.loads(path.read_text())["cells"] if path.exists() else []
    cells = [other for other in old if any(other[key] != cell[key] for key in place)]
    cells = sorted([*cells, cell], key=lambda one: [one[key] for key in place])
    command = cell["command"]
    write_json(path, {"machine": machine(), "command": command, "bounds": BOUNDS, "cells": cells})


def _print(cell: dict[str, Any]) -> None:
    print(
        f"p = {cell['world_size']}, {cell['rate_bits_per_second'] / 1e6:g} Mbit/s, load average "
        f"{cell['load_average']['least']:.1f} to {cell['load_average']['most']:.1f}"
    )
    for name in NAMES:
        of = cell["contestants"][name]
        for what, bound in BOUNDS.items():
            ratio = of[what]["ratio"]
            low, high = ratio["interval"]
            medians = " -> ".join(f"{1e3 * of[what][side]['median']:.0f}" for side in SIDES)
            print(
                f"  {name}: {what} {medians} ms, {ratio['value']:.3f} ({low:.3f} to {high:.3f})"
                + ("" if ratio["value"] <= bound else f", above {bound:g}")
            )


if __name__ == "__main__":
    sys.exit(main())
