"""Measuring the places of a grid: contestants take turns block by block."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks._common import where

from ._cells import Cell, Cells, marks_of
from ._contestants import Surroundings
from ._grid import Grid, Place
from ._kinds import ALONE, BARE, KINDS
from ._laboratory import Laboratory, WorkerError
from ._sparse import DDP_BYTES, OPTIMAL, Curve, plan_of

_FIRST_STEPS = 3  # links are made, buckets rebuilt, memory found
_TRIES = 3
_SPREAD = 0.1  # of the compute, within which ranks begin that are not in step
_FAR_TIMES = 4.0  # who takes so much longer than the best has one turn
_SHARES = ("cpu_seconds", "cpu_busy", "cpu_busy_by_others", "late_share", "uneven_share")

Block = dict[str, Any]


class _FailedError(Exception):
    """A contestant cannot go on, and with it the workers."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def measure_grid(
    laboratory: Laboratory,
    grid: Grid,
    cells: Cells,
    *,
    curve_of: Callable[[float], Curve] = lambda density: {},
    is_late: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
) -> None:
    """Measures what is missing, once, and puts it into `cells`.

    A contestant that fails is left out from then on, and its cell says why; the others begin the
    place anew with fresh workers. So do all when workers end between blocks, a few times.

    Args:
        laboratory: Where.
        grid: What.
        cells: What is there, and gets what is measured.
        curve_of: Seconds of selection at full size, by density.
        is_late: Whether to begin no further place.
        say: Gets a line now and then.
    """
    for place in grid.places:
        names = cells.missing(place, grid.blocks)
        if not names:
            continue
        if is_late():
            say("stopped: the rest is for next time")
            return
        say(f"{place}: {len(names)} contestants")
        failed: dict[str, str] = {}
        broken = 0
        while broken < _TRIES:
            try:
                curve = {} if place.density is None else curve_of(place.density)
                found = _Measuring(laboratory, grid, place, names, curve, failed).cells()
            except _FailedError as error:
                say(f"{error.name} failed: {error}")
                failed[error.name] = str(error)
                broken += error.name == OPTIMAL  # without its plan there is no other
            except WorkerError as error:
                say(f"the workers are started anew: {error}")
                broken += 1
            else:
                cells.put(found)
                for cell in found:
                    say(_line(cell))
                break
            laboratory.restart()


class _Measuring:
    """One place."""

    def __init__(
        self,
        laboratory: Laboratory,
        grid: Grid,
        place: Place,
        names: list[str],
        curve: Curve,
        failed: dict[str, str],
    ) -> None:
        self._laboratory = laboratory
        self._grid = grid
        self._place = place
        self._curve = curve
        self._profile = place.scaled()
        self._able = [name for name in names if name not in failed]
        self._found = {name: self._blank(name, failed.get(name)) for name in names}

    def cells(self) -> list[Cell]:
        laboratory, place = self._laboratory, self._place
        laboratory.join(place.world_size)
        laboratory.set_rate(None)  # making one sends its replica
        plans = {} if place.density is None else self._plans()
        for name in self._able:
            if name != OPTIMAL or place.density is None:
                self._make(name, plans.get(name))
            steps = max(_FIRST_STEPS, KINDS[name].steps)
            settled = self._tried(name, lambda name=name, n=steps: laboratory.settle(name, n))
            self._found[name]["memory_bytes"] = round(settled["memory_bytes"])
        laboratory.set_rate(place.rate)
        blocks = self._blocks()
        laboratory.leave()
        alone = None
        if ALONE in blocks:
            alone = statistics.median(block["seconds"] for block in blocks[ALONE])
        for name in sorted(self._able, key=lambda name: name not in BARE):  # bounds first
            self._fill(name, blocks[name], alone)
        return list(self._found.values())

    def _blank(self, name: str, error: str | None) -> Cell:
        compute = 0.0 if name in BARE else short(self._profile.compute_seconds)
        return {
            "contestant": name,
            **self._place.key(),
            "compute_seconds": compute,
            "step_seconds": [],
            "step_seconds_median": None,
            "bytes_on_wire": None,
            "bare_seconds": None,
            "error": error,
            "marks": ["not measured"],
            "where": where(),
        }

    def _plans(self) -> dict[str, dict[str, Any]]:
        """Plans of all, of what one session has measured."""
        laboratory, place, profile = self._laboratory, self._place, self._profile
        self._make(OPTIMAL, None)
        laboratory.set_rate(place.rate)
        measured = self._tried(OPTIMAL, lambda: laboratory.measured(OPTIMAL))
        laboratory.set_rate(None)
        first, others = DDP_BYTES
        surroundings = Surroundings(profile=profile, size_factor=place.size_factor)
        buckets = round(first * place.size_factor), surroundings.bucket_bytes(others)
        around = profile.forward_seconds + profile.optimizer_seconds
        plans = {}
        for name, cell in self._found.items():
            rival = KINDS[name].rival
            cell |= {"groups": 0, "sparse_groups": 0, "predicted_seconds": profile.compute_seconds}
            if rival is None:
                continue
            plan = plan_of(rival, measured, buckets)
            plans[name] = {"plan": plan.to_json(), "names": measured["names"]}
            cell["groups"] = len(plan.groups)
            cell["sparse_groups"] = sum(group.method == "sparse" for group in plan.groups)
            cell["predicted_seconds"] = short(
                around + measured["first_gradient_seconds"] + plan.finish_seconds
            )
        return plans

    def _make(self, name: str, planned: dict[str, Any] | None) -> None:
        place, profile = self._place, self._profile.to_json()
        sparse = None
        if place.density is not None:
            sparse = {"curve": self._curve, "density": place.density, "plan": None}
            sparse |= {"time_factor": place.time_factor, **(planned or {})}
        self._tried(name, lambda: self._laboratory.make(name, profile, place.size_factor, sparse))

    def _blocks(self) -> dict[str, list[Block]]:
        names, grid = self._able, self._grid
        plans = self._turns()
        blocks: dict[str, list[Block]] = {name: [] for name in names}
        for number in range(grid.blocks):
            self._laboratory.wait_until_quiet(grid.patience_seconds)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                warm_up, steps, spread = plans[name]
                block = self._tried(
                    name,
                    lambda name=name, warm_up=warm_up, steps=steps, spread=spread: (
                        self._laboratory.run(
                            name, warm_up, steps, spread_seconds=spread, hurried=grid.hurried
                        )
                    ),
                )
                blocks[name].append(block)
            if self._place.density is not None:
                best = min(blocks[name][0]["seconds"] for name in names if name != ALONE)
                names = [n for n in names if blocks[n][0]["seconds"] <= _FAR_TIMES * best]
        return blocks

    def _turns(self) -> dict[str, tuple[int, int, float]]:
        """Of each block: steps of the warm-up, those that count, within what time ranks begin."""
        settled: dict[str, float] = {}
        for name in self._able:
            kind = KINDS[name]
            if name != ALONE and not kind.warm_up:  # the hidden settle in their warm-up
                settled[name] = self._tried(
                    name, lambda name=name, n=kind.steps: self._laboratory.settle(name, n)
                )["seconds"]
        turns = {}
        for name in self._able:
            kind = KINDS[name]
            compute = 0.0 if name in BARE else self._profile.compute_seconds
            transfer = settled.get(kind.bare or name, settled.get(name, 0.0))
            step = max(compute, transfer, 1e-4)
            steps = max(kind.least, math.ceil(self._grid.block_seconds / step))
            # What is hidden leaves nothing in flight that could hold up the second step.
            free = not kind.in_step and transfer < compute
            warm_up = min(1, kind.warm_up) if free else kind.warm_up
            # Bytes are counted from the warm-up on: both are whole periods.
            whole = (kind.steps * math.ceil(count / kind.steps) for count in (warm_up, steps))
            turns[name] = (*whole, _SPREAD * compute if free else 0.0)
        return turns

    def _fill(self, name: str, blocks: list[Block], alone: float | None) -> None:
        cell = self._found[name]

        def median(what: str) -> float:
            return statistics.median(block[what] for block in blocks)

        bare = self._found.get(KINDS[name].bare or "")
        cell |= {
            "step_seconds": [short(block["seconds"]) for block in blocks],
            "step_seconds_median": short(median("seconds")),
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
    seconds = cell["step_seconds_median"]
    if seconds is None:
        return f"  {cell['contestant']:32} {cell['error']}"
    low, high = min(cell["step_seconds"]), max(cell["step_seconds"])
    said = f"{1e3 * seconds:8.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})"
    if "predicted_seconds" in cell:
        said += f", predicted {1e3 * cell['predicted_seconds']:.0f}"
    return f"  {cell['contestant']:32} {said} {'; '.join(cell['marks'])}"
