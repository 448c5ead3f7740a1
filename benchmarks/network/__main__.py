"""Ways to keep replicas together, on shaped links, with a GPU's compute replayed.

One worker a host, kept alive from cell to cell; contestants take turns; bytes are those that the
switch has counted. Needs Linux and root. What is there already is not measured again.

    python -m benchmarks.network                 # the quick grid, some 20 minutes
    python -m benchmarks.network --grid full     # hours; goes on where it was stopped
    python -m benchmarks.network --page          # the figures anew, nothing measured
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks._common import RESULTS
from benchmarks.netlab import NetlabError
from gossipgrad.train._summary import machine, versions, write_json

from ._cells import Cells, measure_group
from ._grid import GRIDS, Grid
from ._laboratory import START_RATE, Laboratory, Shaped
from ._page import draw
from ._table import print_table
from ._verdict import shortfalls


def main() -> int:
    """Measures what is missing, prints the table and draws the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=sorted(GRIDS), default="quick")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--page", action="store_true", help="only draw and print what is there")
    parser.add_argument("--minutes", type=float, help="begin no further cells after so long")
    parser.add_argument("--out", type=Path, default=RESULTS / "network.json")
    options = parser.parse_args()
    cells = Cells(options.out, again=options.again)
    if not options.page:
        try:
            _measure(options, cells)
        except NetlabError as error:
            print(f"no laboratory here: {error}", file=sys.stderr)
            return 2
    if not cells.cells:
        print(f"{options.out} has no cells: measure some first", file=sys.stderr)
        return 2
    print_table(cells.cells)
    for line in shortfalls(cells.cells):
        print(line)
    print(options.out, draw(cells.cells, options.out.with_suffix(".png")))
    return 0


def _measure(options: argparse.Namespace, cells: Cells) -> None:
    grid = GRIDS[options.grid]
    start = time.monotonic()
    # A list of cells says nothing of where it was measured: that stands beside it.
    write_json(
        options.out.with_name(f"{options.out.stem}_machine.json"),
        {
            "command": f"python -m benchmarks.network {shlex.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(),
            "budgets": [str(budget) for budget in grid.budgets],
        },
    )
    hosts = max(grid.world_sizes)
    with Shaped(
        hosts=hosts,
        rate_bits_per_second=START_RATE,
    ) as network:
        network.verify()
        with Laboratory(network, hosts) as laboratory:
            _fill(options, grid, cells, laboratory, start)


def _fill(
    options: argparse.Namespace, grid: Grid, cells: Cells, laboratory: Laboratory, start: float
) -> None:
    for budget in grid.budgets:
        for world_size in budget.world_sizes or grid.world_sizes:
            if options.minutes and time.monotonic() - start > 60 * options.minutes:
                print(f"stopped after {options.minutes:g} minutes: the rest is for next time")
                return
            measure_group(laboratory, world_size, budget, grid, cells)


if __name__ == "__main__":
    sys.exit(main())
