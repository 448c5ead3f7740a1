"""Cells of a file, what is missing there, and measuring it: contestants take turns by blocks."""

import json
import math
import statistics
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import machine_name, spread, where, write
from gossipgrad.planning import Profile

from ._contestants import ALONE, BARE, KINDS, Curve
from ._laboratory import Laboratory, WorkerError

MOST_BUSY = 0.7
MOST_BUSY_BY_OTHERS = 0.2
_MOST_LATE = 0.05
_FIRST_STEPS = 3  # links are made, buckets rebuilt, memory found
_TRIES = 3
_SPREAD = 0.1  # of the compute, within which ranks begin that are not in step
_SHARES = ("cpu_seconds", "cpu_busy", "cpu_busy_by_others", "late_share", "uneven_share")
Cell = dict[str, Any]


class Setting(NamedTuple):
    """A profile replayed by some workers on links of a rate, and the contestants there."""

    profile: str
    time_factor: float  # by how much times are longer in the replay
    size_factor: float  # by how much sizes are smaller
    world_size: int
    rate: float  # bits a second of each shaped link
    names: tuple[str, ...]
    density: float | None = None  # the share of a gradient that is sent, where those are sparse

    def key(self) -> dict[str, Any]:
        """What its cells have in common."""
        found = self._asdict() | {"rate_bits_per_second": self.rate}
        return {name: value for name, value in found.items() if name not in ("rate", "names")}

    def __str__(self) -> str:
        return f"{self.profile}, p = {self.world_size}, {self.rate / 1e6:g} Mbit/s"


class Grid(NamedTuple):
    """Settings, how often contestants take turns there, and about how long a block is."""

    settings: tuple[Setting, ...]
    blocks: int
    block_seconds: float
    out: str = "network"  # the results are called so


class Cells:
    """Cells in a file that is whole at any time."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path, self.cells = path, list[Cell]()
        if path.exists():
            try:
                self.cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
                self._ignored = {_identity(cell) for cell in self.cells} if again else set()
            except (ValueError, KeyError, TypeError) as error:
                text = f"{path} holds no cells of `python -m benchmarks.network`: choose another"
                raise ValueError(text) from error
        else:
            self._ignored = set()

    def missing(self, setting: Setting, blocks: int) -> list[str]:
        """Contestants of a setting whose cell is not there, failed, or was disturbed.

        Those that their bounds are made of come with them.
        """
        key = setting.key()
        sound = {
            cell["contestant"]
            for cell in self.cells
            if {name: cell.get(name) for name in key} == key
            and _identity(cell) not in self._ignored
            and _is_sound(cell, blocks)
        }
        wanted = {name for name in setting.names if name not in sound}
        if wanted:
            wanted |= {KINDS[name].bare for name in wanted} | {ALONE}
        return [name for name in setting.names if name in wanted]

    def put(self, cells: list[Cell]) -> None:
        """Adds cells, each instead of an older one, and writes the file."""
        new = {_identity(cell) for cell in cells}
        self._ignored -= new
        self.cells = [cell for cell in self.cells if _identity(cell) not in new] + cells
        names = [*KINDS]
        self.cells.sort(
            key=lambda c: (*_identity(c)[:-1], [*names, c["contestant"]].index(c["contestant"]))
        )
        write("network", {"cells": self.cells}, path=self._path)


def _is_sound(cell: Cell, blocks: int) -> bool:
    return (
        cell["error"] is None
        and len(cell["step_seconds"]) >= blocks
        and cell.get("cpu_busy_by_others", 0.0) <= MOST_BUSY_BY_OTHERS
        and cell["where"].startswith(f"{machine_name()};")
    )


def _identity(cell: Cell) -> tuple:
    keys = ("profile", "time_factor", "size_factor", "density", "rate_bits_per_second")
    return (*(cell.get(key) or 0 for key in (*keys, "world_size")), cell["contestant"])


def marks_of(cell: Cell, alone: float | None = None, bare: Cell | None = None) -> list[str]:
    """What disturbed a cell."""
    compute = cell["compute_seconds"]
    slower = alone / compute - 1 if compute and alone is not None else 0.0
    faults = {
        "CPUs {:.0f} % busy": (cell["cpu_busy"], MOST_BUSY),
        "CPUs {:.0f} % taken by other programs": (cell["cpu_busy_by_others"], MOST_BUSY_BY_OTHERS),
        "emulated compute {:.0f} % late": (cell["late_share"], _MOST_LATE),
        "the last rank began {:.0f} % late": (cell["uneven_share"], _MOST_LATE),
        "the replay alone takes {:.0f} % too long": (slower, _MOST_LATE),
    }
    marks = [text.format(100 * share) for text, (share, most) in faults.items() if share > most]
    if bare is not None and bare["marks"] and bare["step_seconds_median"] > compute:
        marks.append(f"its bound is marked: {'; '.join(bare['marks'])}")
    if not compute and 8 * cell["bytes_on_wire"] * (1 - _MOST_LATE) > (
        cell["rate_bits_per_second"] * cell["step_seconds_median"]
    ):
        marks.append("the link carried more than its rate")
    return marks


class _FailedError(Exception):
    """A contestant cannot continue, and with it the workers."""


def measure_grid(
    laboratory: Laboratory,
    grid: Grid,
    cells: Cells,
    *,
    curve_of: Callable[[float], Curve] = lambda density: {},
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Measures what is missing, once, and puts it into `cells`.

    A contestant that fails is left out from then on, and its cell says why; the others begin the
    setting once more with fresh workers. So do all when workers end between blocks, a few times.
    """
    for setting in grid.settings:
        names = cells.missing(setting, grid.blocks)
        if not names:
            continue
        if is_late():
            print("stopped: the rest is for next time")
            return
        print(f"{setting}: {len(names)} contestants", flush=True)
        curve = None if setting.density is None else curve_of(setting.density)
        failed: dict[str, str] = {}
        for _ in range(_TRIES + len(names)):
            try:
                found = _Measuring(laboratory, grid, setting, names, curve, failed).cells()
            except _FailedError as error:
                name, message = error.args
                print(f"{name} failed: {message}")
                failed[name] = message
            except WorkerError as error:
                print(f"new workers are started: {error}")
            else:
                cells.put(found)
                for cell in found:
                    print(_line(cell), flush=True)
                break
            laboratory.restart()


class _Measuring:
    """One setting."""

    def __init__(
        self,
        laboratory: Laboratory,
        grid: Grid,
        setting: Setting,
        names: list[str],
        curve: Curve | None,
        failed: dict[str, str],
    ) -> None:
        self._laboratory, self._grid, self._setting = laboratory, grid, setting
        profile = Profile.load(setting.profile)
        self._profile = profile.scaled(time=setting.time_factor, size=setting.size_factor)
        self._curve = curve
        self._able = [name for name in names if name not in failed]
        self._found = {
            name: {
                "contestant": name,
                **setting.key(),
                "compute_seconds": 0.0 if name in BARE else short(self._profile.compute_seconds),
                "step_seconds": [],
                "step_seconds_median": None,
                "bytes_on_wire": None,
                "bare_seconds": None,
                "error": failed.get(name),
                "marks": ["not measured"],
                "where": where(),
            }
            for name in names
        }

    def cells(self) -> list[Cell]:
        laboratory, setting = self._laboratory, self._setting
        laboratory.join(setting.world_size)
        laboratory.set_rate(None)  # making one sends its replica
        factors = (setting.time_factor, setting.size_factor, setting.density, self._curve)
        for name in self._able:
            surroundings = (self._profile.to_json(), *factors)
            self._tried(name, lambda n=name, s=surroundings: laboratory.make(n, *s))
            if setting.density is not None:
                laboratory.set_rate(setting.rate)
                self._tried(name, lambda n=name: laboratory.prepare(n))
                laboratory.set_rate(None)
            steps = max(_FIRST_STEPS, KINDS[name].steps)
            settled = self._tried(name, lambda n=name, k=steps: laboratory.settle(n, k))
            self._found[name]["memory_bytes"] = round(settled["memory_bytes"])
        laboratory.set_rate(setting.rate)
        blocks = self._blocks()
        laboratory.leave()
        alone = None
        if ALONE in blocks:
            alone = statistics.median(block["seconds"] for block in blocks[ALONE])
        for name in sorted(self._able, key=lambda name: name not in BARE):  # bounds first
            self._fill(name, blocks[name], alone)
        return list(self._found.values())

    def _blocks(self) -> dict[str, list[dict[str, Any]]]:
        names, turns = self._able, self._turns()
        blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(self._grid.blocks):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                run = lambda n=name: self._laboratory.run(n, *turns[n])  # noqa: E731
                blocks[name].append(self._tried(name, run))
        return blocks

    def _turns(self) -> dict[str, tuple[int, int, float]]:
        """Of each block: steps of the warm-up, those that count, within what time ranks begin."""
        settled: dict[str, float] = {}
        for name in self._able:
            kind = KINDS[name]
            if name != ALONE and not kind.is_hidden:  # the hidden settle in their warm-up
                settle = lambda n=name, k=kind.steps: self._laboratory.settle(n, k)  # noqa: E731
                settled[name] = self._tried(name, settle)["seconds"]
        turns = {}
        for name in self._able:
            kind = KINDS[name]
            compute = 0.0 if name in BARE else self._profile.compute_seconds
            transfer = settled.get(kind.bare or name, settled.get(name, 0.0))
            step = max(compute, transfer, 1e-4)
            steps = max(1 + kind.is_hidden, math.ceil(self._grid.block_seconds / step))
            # What is hidden leaves nothing in flight that could hold up the second step.
            is_apart = (kind.is_hidden and not kind.waits) or name == ALONE
            is_free = is_apart and transfer < compute
            warm_up = (1 if is_free else 2) if kind.is_hidden else 0
            # Bytes are counted from the warm-up on: both are whole periods.
            whole = (kind.steps * math.ceil(count / kind.steps) for count in (warm_up, steps))
            turns[name] = (*whole, _SPREAD * compute if is_free else 0.0)
        return turns

    def _fill(self, name: str, blocks: list[dict[str, Any]], alone: float | None) -> None:
        def median(what: str) -> float:
            return statistics.median(block[what] for block in blocks)

        cell, bare = self._found[name], self._found.get(KINDS[name].bare or "")
        steps = spread([*chain.from_iterable(block["steps"] for block in blocks)])
        cell |= {
            "step_seconds": [short(block["seconds"]) for block in blocks],
            "step_seconds_median": short(median("seconds")),
            "p99_step_seconds": steps["p99"],
            "longest_step_seconds": steps["longest"],
            "bytes_on_wire": round(median("bytes_on_wire")),
            "bare_seconds": bare and bare["step_seconds_median"],
            **{what: short(median(what)) for what in _SHARES},
        }
        cell["marks"] = marks_of(cell, alone, bare if bare and bare["error"] is None else None)

    def _tried(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except WorkerError as error:
            raise _FailedError(name, str(error)) from error


def short(value: float) -> float:
    """As many digits as it is known to."""
    return float(f"{value:.5g}")


def _line(cell: Cell) -> str:
    if cell["step_seconds_median"] is None:
        return f"  {cell['contestant']:32} {cell['error']}"
    seconds = cell["step_seconds_median"], *(f(cell["step_seconds"]) for f in (min, max))
    middle, low, high = (f"{1e3 * each:.0f}" for each in seconds)
    longest = f"{1e3 * cell['longest_step_seconds']:.0f}"
    times = f"{middle:>7} ms ({low} to {high}), longest step {longest}"
    return f"  {cell['contestant']:32} {times} {'; '.join(cell['marks'])}"
