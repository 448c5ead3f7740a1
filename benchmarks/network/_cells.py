"""Measuring cells: contestants take turns block by block, then medians, bounds and marks."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gossipgrad.train._summary import write_json

from ._contestants import BARE, CONTESTANTS, Kind
from ._grid import Budget, Grid
from ._laboratory import Laboratory, WorkerError

MOST_BUSY = 0.7
MOST_LATE = 0.05
_BLOCK_TIMEOUT_SECONDS = 240.0

Cell = dict[str, Any]
Block = dict[str, Any]


class Cells:
    """The cells measured so far, in a file that is whole at any time.

    Args:
        path: Read if it is there, unless `again`.
        again: Forget what is there.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path = path
        self.cells: list[Cell] = []
        if path.exists() and not again:
            self.cells = json.loads(path.read_text(encoding="utf-8"))

    def has(self, world_size: int, rate: float, budget: Budget, grid: Grid) -> bool:
        """Whether this place of the grid is measured, at least as often, on a quiet machine.

        It was not quiet if even the worker that sends nothing found it too busy.
        """
        there = [cell for cell in self.cells if _place(cell) == _key(world_size, rate, budget)]
        measured = [cell for cell in there if cell["error"] is None]
        return bool(there) and all(
            len(cell["step_seconds"]) >= grid.blocks
            and not (cell["contestant"] == "no communication" and cell["marked"])
            for cell in measured
        )

    def put(self, cells: list[Cell]) -> None:
        """Adds cells, in place of older ones, and writes the file."""
        places = {_place(cell) for cell in cells}
        self.cells = [cell for cell in self.cells if _place(cell) not in places] + cells
        self.cells.sort(key=_order)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self.cells)


class _FailedError(Exception):
    """A contestant cannot go on, and with it the workers."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def measure_group(
    laboratory: Laboratory,
    world_size: int,
    budget: Budget,
    grid: Grid,
    cells: Cells,
    names: Iterable[str] = (*BARE, *CONTESTANTS),
    say: Callable[[str], None] = print,
) -> None:
    """Measures the missing rates of one world size and budget, once, and puts them into `cells`.

    A contestant that fails is left out from then on, and its cells say why; the others begin the
    rate anew with fresh workers.
    """
    failed: dict[str, str] = {}
    todo = [
        rate for rate in budget.rates or grid.rates if not cells.has(world_size, rate, budget, grid)
    ]
    while todo:
        chosen = [name for name in names if name not in failed]
        try:
            start = time.monotonic()
            laboratory.join(world_size)
            group = _Group(laboratory, world_size, budget, chosen)
            say(
                f"p = {world_size}, {budget.profile}: {len(chosen)} contestants made in "
                f"{time.monotonic() - start:.0f} s"
            )
            for rate in list(todo):
                start = time.monotonic()
                try:
                    laboratory.set_rate(rate)
                except RuntimeError as error:
                    say(f"p = {world_size}, {rate / 1e6:g} Mbit/s: {error}")
                    cells.put([group.refused(name, rate, str(error)) for name in names])
                    todo.remove(rate)
                    continue
                blocks = group.blocks(grid, rate)
                found = [group.cell(name, rate, blocks) for name in chosen]
                found += [group.refused(name, rate, failed[name]) for name in failed]
                cells.put(found)
                todo.remove(rate)
                say(
                    f"p = {world_size}, {rate / 1e6:g} Mbit/s, {budget.profile}: "
                    f"{time.monotonic() - start:.0f} s"
                )
            laboratory.leave()
        except _FailedError as error:
            say(f"{error.name} failed: {error}")
            failed[error.name] = str(error)
            laboratory.restart()


class _Group:
    """Contestants made for one world size and budget."""

    def __init__(
        self, laboratory: Laboratory, world_size: int, budget: Budget, names: list[str]
    ) -> None:
        self._laboratory = laboratory
        self._world_size = world_size
        self._budget = budget
        self._profile = budget.scaled()
        self._names = names
        self._parameter_bytes = 0
        laboratory.set_rate(None)
        for name in names:
            try:
                made = laboratory.make(name, self._profile.to_json(), budget.size_factor)
                self._parameter_bytes = made or self._parameter_bytes
                kind = kind_of(name)
                # Links are made, buckets rebuilt and memory found in the first steps.
                laboratory.run(name, 2, kind.steps, _BLOCK_TIMEOUT_SECONDS)
            except WorkerError as error:
                raise _FailedError(name, str(error)) from error

    def blocks(self, grid: Grid, rate: float) -> dict[str, list[Block]]:
        """All blocks of all contestants, the first of each, which tells how many steps, left out.

        Raises:
            _FailedError: One does not come to its end.
        """
        taken: dict[str, list[Block]] = {name: [] for name in self._names}
        steps: dict[str, int] = {}
        for number in range(grid.blocks + 1):
            turn = number % len(self._names)
            for name in (*self._names[turn:], *self._names[:turn]):
                kind = kind_of(name)
                try:
                    block = self._laboratory.run(
                        name,
                        kind.warm_up,
                        steps.get(name, kind.steps),
                        _BLOCK_TIMEOUT_SECONDS,
                    )
                except WorkerError as error:
                    raise _FailedError(name, str(error)) from error
                if number == 0:
                    count = math.ceil(grid.block_seconds / block["seconds"] / kind.steps)
                    steps[name] = kind.steps * max(1, count)
                else:
                    taken[name].append(block)
        return taken

    def cell(self, name: str, rate: float, blocks: dict[str, list[Block]]) -> Cell:
        """The figures of one contestant."""
        kind, own = kind_of(name), blocks[name]
        seconds = [block["seconds"] for block in own]
        median = statistics.median(seconds)
        compute = 0.0 if name in BARE else self._profile.compute_seconds
        bare = None
        if kind.bare in blocks:
            bare = statistics.median(block["seconds"] for block in blocks[kind.bare])
        sent = statistics.median(block["bytes_on_wire"] for block in own)
        alone = blocks.get("no communication")
        ceiling = None if not alone else statistics.median(block["seconds"] for block in alone)
        exchange_bound = max(compute, bare or 0.0)
        cell = self._head(name, rate) | {
            "step_seconds": [_short(value) for value in seconds],
            "step_seconds_median": _short(median),
            "compute_seconds": _short(compute),
            "efficiency": _short(compute / median),
            "exposed_seconds": None if ceiling is None else _short(median - ceiling),
            "bytes_on_wire": round(sent),
            "bound_seconds": _short(max(compute, 8 * sent / rate)),
            "bare": kind.bare,
            "bare_seconds": None if bare is None else _short(bare),
            "exchange_bound_seconds": _short(exchange_bound),
            "cpu_seconds": _short(statistics.median(block["cpu_seconds"] for block in own)),
            "cpu_busy": _short(statistics.median(block["cpu_busy"] for block in own)),
            "late_share": _short(statistics.median(block["late_share"] for block in own)),
            "uneven_share": _short(statistics.median(block["uneven_share"] for block in own)),
            "clocks": {
                what: _short(statistics.median(block["clocks"][what] for block in own))
                for what in own[0]["clocks"]
            },
            "error": None,
        }
        cell["marks"] = marks_of(cell)
        cell["marked"] = bool(cell["marks"])
        return cell

    def refused(self, name: str, rate: float, message: str) -> Cell:
        """The cell of a contestant that could not be measured."""
        figures = (
            *("step_seconds_median", "efficiency", "exposed_seconds", "bytes_on_wire"),
            *("bound_seconds", "bare_seconds", "exchange_bound_seconds", "cpu_seconds"),
            *("cpu_busy", "late_share", "uneven_share"),
        )
        return self._head(name, rate) | {
            "step_seconds": [],
            "compute_seconds": _short(self._profile.compute_seconds),
            "bare": kind_of(name).bare,
            "clocks": {},
            **dict.fromkeys(figures),
            "error": message,
            "marks": ["not measured"],
            "marked": True,
        }

    def _head(self, name: str, rate: float) -> Cell:
        return {
            "contestant": f"bare {name}" if name in BARE else name,
            "mixes_every_step": kind_of(name).mixes,
            "world_size": self._world_size,
            "rate_bits_per_second": rate,
            "profile": self._budget.profile,
            "time_factor": self._budget.time_factor,
            "size_factor": self._budget.size_factor,
            "parameter_bytes": self._parameter_bytes,
        }


def kind_of(name: str) -> Kind:
    """What is known of a contestant or a bare transfer."""
    return (CONTESTANTS | BARE)[name]


def marks_of(cell: Cell) -> list[str]:
    """Why a cell claims nothing."""
    marks = []
    if cell["cpu_busy"] > MOST_BUSY:
        marks.append(f"CPUs {100 * cell['cpu_busy']:.0f} % busy")
    if cell["late_share"] > MOST_LATE:
        marks.append(f"emulated compute {100 * cell['late_share']:.0f} % late")
    if cell["uneven_share"] > MOST_LATE:
        marks.append(f"the last rank began {100 * cell['uneven_share']:.0f} % late")
    return marks


def _key(world_size: int, rate: float, budget: Budget) -> tuple:
    return world_size, rate, budget.profile, budget.time_factor, budget.size_factor


def _place(cell: Cell) -> tuple:
    return (
        *(cell["world_size"], cell["rate_bits_per_second"], cell["profile"]),
        *(cell["time_factor"], cell["size_factor"]),
    )


def _order(cell: Cell) -> tuple:
    world_size, rate, profile, times, sizes = _place(cell)
    names = [*CONTESTANTS, *(f"bare {name}" for name in BARE)]
    known = cell["contestant"]
    return profile, times, sizes, rate, world_size, names.index(known) if known in names else 99


def _short(value: float) -> float:
    return float(f"{value:.5g}")
