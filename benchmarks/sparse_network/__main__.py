"""Ways to aggregate gradients, sparse or not, on shaped links, with a GPU's compute replayed.

A session of `gg.sparsify` measures and plans in each place; its own plan and those of the published
rules then take turns. Selection is slept at what it costs at full size, measured first. Needs Linux
and root. What is there is not measured again.

    python -m benchmarks.sparse_network                   # all grids, some 30 minutes
    python -m benchmarks.sparse_network resnet50 sweep    # some of them
    python -m benchmarks.sparse_network --minutes 4       # and no more: the rest is for next time
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, write
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError
from benchmarks.network._hosts import Shaped
from benchmarks.network._laboratory import WorkerError
from benchmarks.network._where import machine_name

from . import _selection
from ._cell import SparseLaboratory, measure_place
from ._grid import GRIDS, Place

_NAME = "sparse_network"
_SEED = 0
_MOST_ELEMENTS = 1 << 27
_DENSITIES = (0.001, 0.01)


def main() -> int:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("grids", nargs="*", metavar="GRID", help=f"of {', '.join(GRIDS)}")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{_NAME}.json")
    options = parser.parse_args()
    if unknown := [name for name in options.grids if name not in GRIDS]:
        parser.error(f"no grid {unknown[0]!r}: choose among {', '.join(GRIDS)}")
    figures = _read(options.out)
    try:
        with ends_as_ctrl_c():
            _measure(options, figures)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (NetlabError, WorkerError) as error:
        print(f"the laboratory cannot go on: {error}", file=sys.stderr)
        return 2
    return 0


def _quoted(cell: dict[str, Any]) -> dict[str, Any]:
    """What the pages quote of a cell."""
    kept = ("groups", "sparse_groups", "predicted_seconds", "step_seconds", "error")
    kept += ("step_seconds_median", "marks")
    return {name: value for name, value in cell.items() if name != "measured"} | {
        "contestants": {
            name: {key: of[key] for key in kept if key in of}
            for name, of in cell["contestants"].items()
        }
    }


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"seed": _SEED, "selection": {}, "cells": []}
    held = json.loads(path.read_text(encoding="utf-8"))
    return {key: held[key] for key in ("seed", "selection", "cells")}


def _measure(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    start = time.monotonic()
    selection = figures["selection"].setdefault(machine_name(), {})
    for density in _DENSITIES:
        if str(density) not in selection:
            curves = _selection.measure(_MOST_ELEMENTS, density, _SEED)
            selection[str(density)] = _selection.as_json(curves)
            write(_NAME, figures, path=options.out)
            print(f"selection at density {density:g} measured", flush=True)
    places = [place for name in options.grids or GRIDS for place in GRIDS[name]]
    todo = [place for place in places if not _there(place, figures)]
    if not todo:
        return
    hosts, raw = max(place.world_size for place in todo), list[dict[str, Any]]()
    with Shaped(hosts) as network, SparseLaboratory(network, hosts) as laboratory:
        for place in todo:
            if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
                print("stopped: the rest is for next time")
                return
            begun = time.monotonic()
            cell = measure_place(laboratory, place, selection[str(place.density)])
            raw.append(cell)
            figures["cells"].append(_quoted(cell))
            write(_NAME, figures, raw=raw, path=options.out)
            print(f"{place}: {time.monotonic() - begun:.0f} s", flush=True)
            for name, of in cell["contestants"].items():
                print(
                    f"  {name:20} {of['groups']:4} groups, {of['sparse_groups']:4} sparse, "
                    f"predicted {of['predicted_seconds']:.3f}, measured "
                    f"{of.get('step_seconds_median') or of['error']} {of.get('marks', '')}",
                    flush=True,
                )


def _there(place: Place, figures: dict[str, Any]) -> bool:
    key = place.key()
    return any(key == {name: cell[name] for name in key} for cell in figures["cells"])


if __name__ == "__main__":
    sys.exit(main())
