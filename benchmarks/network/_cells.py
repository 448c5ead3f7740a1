"""The cells measured so far, and which are missing."""

import fcntl
import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._common import write_json

from ._grid import Budget, Grid
from ._kinds import ALONE, BARE, CONTESTANTS, kind_of, label
from ._marks import MOST_BUSY_BY_OTHERS
from ._where import machine_name

_LOCK_SECONDS = 20.0
ANYONE = "any"  # of a place that is refused whoever comes

Cell = dict[str, Any]

_PLACE = ("world_size", "rate_bits_per_second", "profile", "time_factor", "size_factor")
# What every cell says, and what more is needed to show it.
SAYS = ("contestant", *_PLACE, "step_seconds_median", "marked")
_SHOWS = (*SAYS, "step_seconds", "compute_seconds", "bare_seconds", "exchange_bound_seconds")
_SHOWS += ("efficiency", "bytes_on_wire", "mixes_every_step", "error", "where")


def read(path: Path, needed: Iterable[str] = SAYS) -> list[Cell]:
    """The cells of a file.

    Raises:
        ValueError: It holds something else.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _no_cells(path, str(error)) from error
    if not isinstance(cells, list):
        raise _no_cells(path, "no list")
    for number, cell in enumerate(cells):
        lacks = [key for key in needed if not isinstance(cell, dict) or key not in cell]
        if lacks:
            raise _no_cells(path, f"entry {number} lacks {lacks[0]!r}")
    return cells


def _no_cells(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} holds no cells of `python -m benchmarks.network`: {why}")


class Cells:
    """Cells in a file that is whole at any time; two grids may add to it.

    Args:
        path: Read if it is there.
        again: Take none of what is there for measured; it stays until it is measured anew.

    Raises:
        ValueError: The file holds something else.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path = path
        self._again = again
        self._put: set[tuple] = set()
        self.cells: list[Cell] = []
        self._read()

    def missing(
        self, world_size: int, rate: float, budget: Budget, grid: Grid, names: Iterable[str]
    ) -> list[str]:
        """Who is to be measured in a place: whose cell is not there, failed, or was disturbed.

        Those that their bounds and exposed seconds are made of come with them.
        """
        place = _key(world_size, rate, budget)
        there = {
            cell["contestant"]: cell
            for cell in self.cells
            if _place(cell) == place and (not self._again or _identity(cell) in self._put)
        }
        names = list(names)
        wanted = {name for name in names if not _is_sound(there.get(label(name)), grid.blocks)}
        if wanted:
            wanted |= {kind_of(name).bare for name in wanted} | {ALONE}
        return [name for name in names if name in wanted]

    def put(self, cells: list[Cell]) -> None:
        """Adds cells, each in place of an older one, and writes the file."""
        new = {_identity(cell) for cell in cells}
        places = {_place(cell) for cell in cells}
        refused = {_place(cell) for cell in cells if cell["contestant"] == ANYONE}

        def stays(cell: Cell) -> bool:
            if _identity(cell) in new or (cell["contestant"] == ANYONE and _place(cell) in places):
                return False
            return cell["error"] is None or _place(cell) not in refused

        self._put |= new
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(self._path.parent):
            self._read()
            self.cells = [cell for cell in self.cells if stays(cell)] + cells
            self.cells.sort(key=_order)
            write_json(self._path, self.cells)

    def _read(self) -> None:
        """Takes what is there, unless the file is gone."""
        if self._path.exists():
            self.cells = read(self._path, _SHOWS)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time writes into a folder; waits a bounded time for the others."""
    deadline = time.monotonic() + _LOCK_SECONDS
    handle = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    warnings.warn(
                        f"another process has held the lock of {folder} for {_LOCK_SECONDS:g} s: "
                        "written without it, what that process writes may be lost",
                        stacklevel=3,
                    )
                    break
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _is_sound(cell: Cell | None, blocks: int) -> bool:
    return (
        cell is not None
        and cell["error"] is None
        and len(cell["step_seconds"]) >= blocks
        and cell.get("cpu_busy_by_others", 1.0) <= MOST_BUSY_BY_OTHERS
        and cell["where"]["machine"] == machine_name()
    )


def _key(world_size: int, rate: float, budget: Budget) -> tuple:
    return world_size, rate, budget.profile, budget.time_factor, budget.size_factor


def _place(cell: Cell) -> tuple:
    return tuple(cell[key] for key in _PLACE)


def _identity(cell: Cell) -> tuple:
    return (*_place(cell), cell["contestant"])


def _order(cell: Cell) -> tuple:
    world_size, rate, profile, times, sizes = _place(cell)
    names = [*CONTESTANTS, *(label(name) for name in BARE)]
    known = cell["contestant"]
    return profile, times, sizes, rate, world_size, names.index(known) if known in names else 99
