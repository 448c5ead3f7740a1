"""The cells of a file: which are missing, and why one claims nothing."""

import json
from pathlib import Path
from typing import Any

from benchmarks._common import machine_name, write

from ._grid import Place
from ._kinds import ALONE, KINDS

MOST_BUSY = 0.7
MOST_BUSY_BY_OTHERS = 0.2
MOST_LATE = 0.05

Cell = dict[str, Any]
_SAYS = ("contestant", "world_size", "rate_bits_per_second", "profile", "marks")


def read(path: Path) -> list[Cell]:
    """The cells of a file.

    Raises:
        ValueError: It holds something else.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        lacking = [key for cell in cells for key in _SAYS if key not in cell]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no cells of `python -m benchmarks.network`") from error
    if lacking:
        raise ValueError(f"{path}: a cell lacks {lacking[0]!r}")
    return cells


class Cells:
    """Cells in a file that is whole at any time.

    Args:
        path: Read if it is there.
        again: Measure anew what is there; it stays until then.

    Raises:
        ValueError: The file holds something else.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path = path
        self.cells = read(path) if path.exists() else []
        self._ignored = {_identity(cell) for cell in self.cells} if again else set()

    def missing(self, place: Place, blocks: int) -> list[str]:
        """Who is to be measured in a place: whose cell is not there, failed, or was disturbed.

        Those that their bounds are made of come with them.
        """
        key = place.key()
        sound = {
            cell["contestant"]
            for cell in self.cells
            if {name: cell.get(name) for name in key} == key
            and _identity(cell) not in self._ignored
            and _is_sound(cell, blocks)
        }
        wanted = {name for name in place.names if name not in sound}
        if wanted:
            wanted |= {KINDS[name].bare for name in wanted} | {ALONE}
        if wanted and place.density is not None:
            wanted = set(place.names)  # plans and predictions are those of one session
        return [name for name in place.names if name in wanted]

    def put(self, cells: list[Cell]) -> None:
        """Adds cells, each in place of an older one, and writes the file."""
        new = {_identity(cell) for cell in cells}
        self._ignored -= new
        self.cells = [cell for cell in self.cells if _identity(cell) not in new] + cells
        self.cells.sort(key=_order)
        write("network", {"cells": self.cells}, path=self._path)


def marks_of(cell: Cell, alone: float | None = None, bare: Cell | None = None) -> list[str]:
    """What disturbed a cell.

    Args:
        cell: Its figures.
        alone: Seconds of a step without communication in the same place.
        bare: The cell of the bare transfer that its bound is made of.
    """
    marks = []
    if cell["cpu_busy"] > MOST_BUSY:
        marks.append(f"CPUs {100 * cell['cpu_busy']:.0f} % busy")
    if cell["cpu_busy_by_others"] > MOST_BUSY_BY_OTHERS:
        marks.append(f"CPUs {100 * cell['cpu_busy_by_others']:.0f} % taken by other programs")
    if cell["late_share"] > MOST_LATE:
        marks.append(f"emulated compute {100 * cell['late_share']:.0f} % late")
    if cell["uneven_share"] > MOST_LATE:
        marks.append(f"the last rank began {100 * cell['uneven_share']:.0f} % late")
    compute = cell["compute_seconds"]
    if compute and alone is not None and alone / compute - 1 > MOST_LATE:
        marks.append(f"the replay alone takes {100 * (alone / compute - 1):.0f} % too long")
    if bare is not None and bare["marks"] and bare["step_seconds_median"] > compute:
        marks.append(f"its bound is marked: {'; '.join(bare['marks'])}")
    if not compute and 8 * cell["bytes_on_wire"] * (1 - MOST_LATE) > (
        cell["rate_bits_per_second"] * cell["step_seconds_median"]
    ):
        marks.append("the link carried more than its rate")
    return marks


def _is_sound(cell: Cell, blocks: int) -> bool:
    return (
        cell["error"] is None
        and (len(cell["step_seconds"]) >= blocks or "predicted_seconds" in cell)
        and cell.get("cpu_busy_by_others", 0.0) <= MOST_BUSY_BY_OTHERS
        and cell["where"].startswith(f"{machine_name()};")
    )


def _place(cell: Cell) -> tuple:
    return tuple(
        cell.get(key) or 0
        for key in (
            *("profile", "time_factor", "size_factor", "density", "rate_bits_per_second"),
            "world_size",
        )
    )


def _identity(cell: Cell) -> tuple:
    return (*_place(cell), cell["contestant"])


def _order(cell: Cell) -> tuple:
    return (*_place(cell), [*KINDS].index(cell["contestant"]))
