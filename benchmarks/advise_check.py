"""Is what `gg.advise` recommends the fastest? Held against the cells of the shaped network.

Reads what `python -m benchmarks.network` has measured, all grids, and asks for advice among the
contestants of each cell, with accuracy left out: is the recommended one's measured step within 5 %
of the fastest that was measured? The network is described by the rate of its links, and once more
by `gossipgrad probe`, where it has measured that network. Measures nothing itself.

    python -m benchmarks.advise_check
"""

import json
import sys
from collections import defaultdict
from typing import Any

import gossipgrad as gg
from benchmarks._common import RESULTS, write
from benchmarks.simulate_check import CONTESTANTS, from_rate
from gossipgrad.planning import Profile
from gossipgrad.simulate import Candidate, Network

# Peers' packages are measured there, too, and rarer averages learn otherwise.
ADVISED = ("gossip", "gossip, sync", "gossip, bf16 wire", "ddp", "ddp, fp16 hook", "agd")
WITHIN = 0.05

Cell = dict[str, Any]


def places() -> dict[tuple, dict[str, Cell]]:
    """Cells by place: a profile, its scale, so many ranks, a rate; two contestants or more."""
    found: dict[tuple, dict[str, Cell]] = defaultdict(dict)
    for name in ("network", "network_sync"):
        held = json.loads((RESULTS / f"{name}.json").read_text())
        for cell in held if isinstance(held, list) else held["cells"]:
            if cell["contestant"] in ADVISED and cell.get("step_seconds_median"):
                where = ("profile", "time_factor", "size_factor", "world_size")
                place = (name, *(cell[key] for key in where), cell["rate_bits_per_second"])
                found[place][cell["contestant"]] = cell
    return {place: cells for place, cells in found.items() if len(cells) > 1}


def probes() -> dict[tuple[int, float], Network]:
    """What `gossipgrad probe` has measured on the network of the cells."""
    held = json.loads((RESULTS / "network_probes.json").read_text())
    rows = held if isinstance(held, list) else held["probes"]
    return {
        (row["world_size"], row["rate_bits_per_second"]): Network.from_json(row) for row in rows
    }


def recommended(cells: dict[str, Cell], network: Network) -> str:
    """Which of the contestants of a place `gg.advise` takes."""
    cell = next(iter(cells.values()))
    profile = Profile.load(cell["profile"]).scaled(
        time=cell["time_factor"], size=cell["size_factor"]
    )
    compared = [
        Candidate(settings=name, strategy=CONTESTANTS[name](one), losses=(0.0, 0.0, 0.0))
        for name, one in cells.items()
    ]
    advice = gg.advise(profile, network=network, world_size=cell["world_size"], compared=compared)
    return advice.best.settings


def row(
    place: tuple, cells: dict[str, Cell], network: Network, described_by: str
) -> dict[str, Any]:
    """The recommended contestant beside the fastest."""
    taken = recommended(cells, network)
    steps = {name: cell["step_seconds_median"] for name, cell in cells.items()}
    best = min(steps, key=lambda name: steps[name])
    return {
        **dict(zip(("grid", "profile", "time_factor", "size_factor"), place[:4], strict=True)),
        "world_size": place[4],
        "rate_bits_per_second": place[5],
        "network": described_by,
        "recommended": taken,
        "fastest": best,
        "times_as_long": round(steps[taken] / steps[best], 4),
    }


def main() -> int:
    """Prints and writes a row a place."""
    known, rows = probes(), []
    for place, cells in sorted(places().items()):
        rows.append(row(place, cells, from_rate(next(iter(cells.values()))), "rate of the links"))
        if (place[4], place[5]) in known:
            rows.append(row(place, cells, known[place[4], place[5]], "probe"))
    summary = {}
    for described_by in ("rate of the links", "probe"):
        ratios = [one["times_as_long"] for one in rows if one["network"] == described_by]
        summary[described_by] = {
            "places": len(ratios),
            "within_5_percent": sum(ratio <= 1 + WITHIN for ratio in ratios),
            "most": max(ratios, default=None),
        }
    for one in rows:
        print(one)
    print(json.dumps(summary, indent=2))
    write("advise_check", {"summary": summary, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
