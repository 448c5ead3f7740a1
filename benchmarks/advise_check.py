"""Is what `gg.advise` recommends the fastest? Held against the cells of the shaped network.

Reads what `python -m benchmarks.network` has measured, all grids, and asks for advice among the
contestants of each place, with accuracy left out: is the recommended one's measured step within 5 %
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
from benchmarks.network._cells import Cell, read
from benchmarks.simulate_check import CONTESTANTS, from_rate
from gossipgrad.planning import Profile
from gossipgrad.simulate import Candidate, Network

# Peers' packages are measured there, too, and rarer averages learn otherwise.
ADVISED = ("gossip", "gossip, sync", "gossip, bf16 wire", "ddp", "ddp, fp16 hook", "agd")
PLACE = ("profile", "time_factor", "size_factor", "world_size", "rate_bits_per_second")
WITHIN = 0.05


def row(grid: str, cells: dict[str, Cell], network: Network, described_by: str) -> dict[str, Any]:
    """Of one place, the recommended contestant beside the fastest."""
    cell = next(iter(cells.values()))
    profile = Profile.load(cell["profile"]).scaled(
        time=cell["time_factor"], size=cell["size_factor"]
    )
    compared = [
        Candidate(settings=name, strategy=CONTESTANTS[name](one), losses=(0.0, 0.0, 0.0))
        for name, one in cells.items()
    ]
    world_size = cell["world_size"]
    advice = gg.advise(profile, network=network, world_size=world_size, compared=compared)
    taken = advice.best.settings
    steps = {name: one["step_seconds_median"] for name, one in cells.items()}
    fastest = min(steps, key=lambda name: steps[name])
    return {
        "grid": grid,
        **{key: cell[key] for key in PLACE},
        "network": described_by,
        "recommended": taken,
        "fastest": fastest,
        "times_as_long": round(steps[taken] / steps[fastest], 4),
    }


def main() -> int:
    """Prints and writes a row a place and description of the network."""
    probes = {
        (each["world_size"], each["rate_bits_per_second"]): Network.from_json(each)
        for each in json.loads((RESULTS / "network_probes.json").read_text())["probes"]
    }
    places: dict[tuple, dict[str, Cell]] = defaultdict(dict)
    for grid in ("network", "network_sync"):
        for cell in read(RESULTS / f"{grid}.json"):
            if cell["contestant"] in ADVISED and cell.get("step_seconds_median"):
                place = (grid, *(cell[key] for key in PLACE))
                places[place][cell["contestant"]] = cell
    rows, summary = [], {}
    for place, cells in sorted(places.items()):
        if len(cells) > 1:
            known = {"rate of the links": from_rate(next(iter(cells.values())))}
            known |= {"probe": probes[place[4:]]} if place[4:] in probes else {}
            rows += [row(place[0], cells, network, by) for by, network in known.items()]
            print(rows[-1])
    for described_by in ("rate of the links", "probe"):
        ratios = [one["times_as_long"] for one in rows if one["network"] == described_by]
        summary[described_by] = {
            "places": len(ratios),
            "within_5_percent": sum(ratio <= 1 + WITHIN for ratio in ratios),
            "most": max(ratios, default=None),
        }
    print(summary)
    print(write("advise_check", {"summary": summary, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
