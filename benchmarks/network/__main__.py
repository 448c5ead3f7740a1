"""Ways to keep replicas together, on shaped links, with a GPU's compute replayed.

One worker a host, kept alive from cell to cell; contestants take turns; bytes are those that the
switch has counted. Needs Linux and root. What is there is not measured again, unless it failed or
other programs disturbed it.

    python -m benchmarks.network                     # the quick grid, some 20 minutes
    python -m benchmarks.network --minutes 20        # begin nothing after so long
    python -m benchmarks.network --grid full         # hours; goes on where it was stopped
    python -m benchmarks.network --grid sync         # gossip beside its mode sync
    python -m benchmarks.network --grid sparse       # merge rules and `gg.sparsify`, 15 minutes
"""

import argparse
import sys
import time
from functools import cache
from pathlib import Path

from benchmarks._common import RESULTS, ends_as_ctrl_c, machine_name, once

from ._cells import Cells
from ._grid import GRIDS
from ._laboratory import Laboratory, WorkerError
from ._measure import measure_grid
from ._namespaces import NetworkError
from ._network import Network
from ._sparse import Curve, measure_selection

_MOST_ELEMENTS = 1 << 27


@cache
def selection(density: float) -> Curve:
    """What selecting costs on this machine; measured once."""
    path = RESULTS / "raw" / f"selection_{density:g}.json"
    setting = {"machine": machine_name(), "most_elements": _MOST_ELEMENTS}
    return once(path, setting, lambda: measure_selection(_MOST_ELEMENTS, density))


def main() -> int:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=sorted(GRIDS), default="quick")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    grid = GRIDS[options.grid]
    out = options.out or RESULTS / f"{grid.out}.json"
    start = time.monotonic()
    try:
        cells = Cells(out, again=options.again)
        hosts = max(place.world_size for place in grid.places)
        with (
            ends_as_ctrl_c(),
            Network(hosts=hosts, rate_bits_per_second=1e8) as network,
            Laboratory(network) as laboratory,
        ):
            measure_grid(
                laboratory,
                grid,
                cells,
                curve_of=selection,
                is_late=lambda: time.monotonic() - start > 60 * options.minutes,
            )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (NetworkError, WorkerError, ValueError) as error:
        print(f"the laboratory cannot go on: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
