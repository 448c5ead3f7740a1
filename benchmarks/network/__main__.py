"""Ways to keep replicas together, on shaped links, with a GPU's compute replayed.

One worker a host, kept alive from cell to cell; contestants take turns; bytes are those that the
switch has counted. Needs Linux and root. What is there is not measured again, unless it failed or
other programs disturbed it.

    python -m benchmarks.network                 # the quick grid, some 20 minutes
    python -m benchmarks.network --minutes 20    # and no more: what is missing is for next time
    python -m benchmarks.network --grid full     # hours; goes on where it was stopped
    python -m benchmarks.network --grid sync     # gossip beside its mode sync
    python -m benchmarks.network --page          # the table of what is there, nothing measured
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks._common import RESULTS, write_json
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError
from gossipgrad.train._summary import machine, versions

from ._cells import Cells
from ._grid import GRIDS
from ._group import measure_group
from ._hosts import Shaped
from ._laboratory import Laboratory, WorkerError
from ._table import print_table
from ._where import where


def main() -> int:
    """Measures what is missing, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=sorted(GRIDS), default="quick")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--page", action="store_true", help="only print what is there")
    parser.add_argument("--minutes", type=float, help="end after so long; what is done stays")
    parser.add_argument("--out", type=Path, default=RESULTS / "network.json")
    options = parser.parse_args()
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: leave it out for no limit")
    try:
        cells = Cells(options.out, again=options.again)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.page:
        try:
            with ends_as_ctrl_c():
                _measure(options, cells)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", file=sys.stderr)
            return 130
        except NetlabError as error:
            print(f"no laboratory here: {error}", file=sys.stderr)
            return 2
        except WorkerError as error:
            print(f"the workers do not start: {error}", file=sys.stderr)
            return 2
    if not cells.cells:
        print(f"{options.out} has no cells: measure some first", file=sys.stderr)
        return 2
    print_table(cells.cells)
    print(options.out)
    return 0


def _measure(options: argparse.Namespace, cells: Cells) -> None:
    grid = GRIDS[options.grid]
    commit = where()["commit"] or ""
    if options.out.resolve().parent == RESULTS.resolve() and commit.endswith("-dirty"):
        print(
            f"the cells will name {commit}, a tree that nobody can check out: commit first, or "
            "write elsewhere with --out",
            file=sys.stderr,
        )
    start = time.monotonic()
    # Every cell says where it was measured; this is how it was last gone on with.
    write_json(
        options.out.with_name(f"{options.out.stem}_machine.json"),
        {
            "command": f"python -m benchmarks.network {shlex.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(),
            "budgets": [str(budget) for budget in grid.budgets],
        },
    )

    def is_late() -> bool:
        return options.minutes is not None and time.monotonic() - start > 60 * options.minutes

    hosts = max(grid.world_sizes)
    with Shaped(hosts) as network, Laboratory(network, hosts) as laboratory:
        for budget in grid.budgets:
            for world_size in budget.world_sizes or grid.world_sizes:
                measure_group(laboratory, world_size, budget, grid, cells, is_late=is_late)
    if is_late():
        print(f"stopped after {options.minutes:g} minutes: the rest is for next time")


if __name__ == "__main__":
    sys.exit(main())
