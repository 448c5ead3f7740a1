"""Measuring one world size and budget: contestants take turns block by block."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.netlab import NetlabError

from ._cells import ANYONE, Cell, Cells
from ._grid import Budget, Grid
from ._kinds import ALONE, BARE, CONTESTANTS, kind_of, label
from ._laboratory import Laboratory, WorkerError
from ._marks import marks_of
from ._where import where

_BLOCK_TIMEOUT_SECONDS = 240.0
_FIRST_STEPS = 3  # links are made, buckets rebuilt, memory found
_TRIES = 3
_SPREAD = 0.1  # of the compute, within which ranks begin that are not in step
_FIGURES = (
    *("step_seconds_median", "efficiency", "exposed_seconds", "bytes_on_wire", "bound_seconds"),
    *("bare_seconds", "exchange_bound_seconds", "cpu_seconds", "cpu_busy", "cpu_busy_by_others"),
    *("late_share", "uneven_share", "warm_up_steps", "steps_per_block", "memory_bytes"),
)

Block = dict[str, Any]


class _Plan(NamedTuple):
    """Steps of a block before those that count, those, and within what time ranks begin."""

    warm_up: int
    steps: int
    spread_seconds: float


class _LateError(Exception):
    """The time is over in the middle of a rate."""


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
    *,
    is_late: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = print,
) -> None:
    """Measures what is missing of one world size and budget, once, and puts it into `cells`.

    A contestant that fails is left out from then on, and its cells say why; the others begin the
    rate anew with fresh workers. So do all when workers end between blocks, a few times.

    Args:
        laboratory: Where.
        world_size: Of how many workers.
        budget: What is replayed.
        grid: Rates, repeats and contestants.
        cells: What is there, and gets what is measured.
        is_late: Whether to end; a rate that is not done then is left as it was.
        say: Tells how it goes on.
    """
    blank = _Blank(world_size, budget)
    todo: dict[float, list[str]] = {}
    for rate in budget.rates or grid.rates:
        if refusal := laboratory.refusal(world_size, rate):
            cells.put([blank.cell(ANYONE, rate, refusal)])
            say(f"p = {world_size}, {rate / 1e6:g} Mbit/s: {refusal}")
            continue
        names = grid.names(world_size, rate, budget)
        if missing := cells.missing(world_size, rate, budget, grid, names):
            todo[rate] = missing
    failed: dict[str, str] = {}
    broken = 0
    while todo and not is_late():
        try:
            _measure_rates(laboratory, blank, grid, cells, todo, failed, is_late, say)
        except _LateError as error:
            say(f"p = {world_size}, {error}")
            return
        except _FailedError as error:
            say(f"{error.name} failed: {error}")
            failed[error.name] = str(error)
            laboratory.restart()
        except WorkerError as error:
            say(f"the workers are started anew: {error}")
            laboratory.restart()
            broken += 1
            if broken == _TRIES:
                for rate, names in todo.items():
                    cells.put([blank.cell(name, rate, str(error)) for name in names])
                return


def _measure_rates(
    laboratory: Laboratory,
    blank: "_Blank",
    grid: Grid,
    cells: Cells,
    todo: dict[float, list[str]],
    failed: dict[str, str],
    is_late: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    wanted = {name for names in todo.values() for name in names}
    chosen = [name for name in (*BARE, *CONTESTANTS) if name in wanted - failed.keys()]
    start = time.monotonic()
    laboratory.join(blank.world_size)
    group = _Group(laboratory, blank, chosen)
    here = f"p = {blank.world_size}"
    profile = blank.budget.profile
    took = time.monotonic() - start
    say(f"{here}, {profile}: {len(chosen)} contestants made in {took:.0f} s")
    for rate, names in list(todo.items()):
        if is_late():
            break
        start = time.monotonic()
        found = [blank.cell(name, rate, failed[name]) for name in names if name in failed]
        able = [name for name in names if name not in failed]
        try:
            laboratory.set_rate(rate)
        except NetlabError as error:
            say(f"{here}, {rate / 1e6:g} Mbit/s: {error}")
            found += [blank.cell(name, rate, str(error)) for name in able]
        else:
            found += group.measured(able, grid, rate, is_late)
        cells.put(found)
        del todo[rate]
        say(f"{here}, {rate / 1e6:g} Mbit/s, {profile}: {time.monotonic() - start:.0f} s")
    laboratory.leave()


class _Blank:
    """What all cells of one world size and budget have in common."""

    def __init__(self, world_size: int, budget: Budget) -> None:
        self.world_size = world_size
        self.budget = budget
        self.profile = budget.scaled()
        self.parameter_bytes = 0
        self._where = where()

    def cell(self, name: str, rate: float, error: str | None) -> Cell:
        """Without figures."""
        known = None if name == ANYONE else kind_of(name)
        return {
            "contestant": label(name),
            "mixes_every_step": known is not None and known.mixes,
            "world_size": self.world_size,
            "rate_bits_per_second": rate,
            "profile": self.budget.profile,
            "time_factor": self.budget.time_factor,
            "size_factor": self.budget.size_factor,
            "parameter_bytes": self.parameter_bytes,
            "step_seconds": [],
            "compute_seconds": 0.0 if name in BARE else _short(self.profile.compute_seconds),
            **dict.fromkeys(_FIGURES),
            "bare": known and known.bare,
            "error": error,
            "marks": ["not measured"],
            "marked": True,
            "where": self._where,
        }


class _Group:
    """Contestants made for one world size and budget."""

    def __init__(self, laboratory: Laboratory, blank: _Blank, names: list[str]) -> None:
        self._laboratory = laboratory
        self._blank = blank
        self._memory_bytes: dict[str, float] = {}
        laboratory.set_rate(None)
        for name in names:
            try:
                made = laboratory.make(name, blank.profile.to_json(), blank.budget.size_factor)
                blank.parameter_bytes = made or blank.parameter_bytes
                steps = max(_FIRST_STEPS, kind_of(name).steps)
                settled = laboratory.settle(name, steps, _BLOCK_TIMEOUT_SECONDS)
                self._memory_bytes[name] = settled["memory_bytes"]
            except WorkerError as error:
                raise _FailedError(name, str(error)) from error

    def measured(
        self, names: list[str], grid: Grid, rate: float, is_late: Callable[[], bool]
    ) -> list[Cell]:
        """The cells of one rate.

        Raises:
            _FailedError: A contestant does not come to its end.
            _LateError: The time is over before all have had their blocks.
        """
        settled = {name: self._settled(name) for name in names}
        plans = {name: self._plan(name, grid, settled) for name in names}
        blocks: dict[str, list[Block]] = {name: [] for name in names}
        for number in range(grid.blocks):
            if is_late():
                raise _LateError(
                    f"{rate / 1e6:g} Mbit/s: stopped after {number} of {grid.blocks} turns, which "
                    "are not kept"
                )
            self._laboratory.wait_until_quiet(grid.patience_seconds)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                try:
                    block = self._laboratory.run(
                        name,
                        plans[name].warm_up,
                        plans[name].steps,
                        _BLOCK_TIMEOUT_SECONDS,
                        spread_seconds=plans[name].spread_seconds,
                        hurried=grid.hurried,
                    )
                except WorkerError as error:
                    raise _FailedError(name, str(error)) from error
                blocks[name].append(block)
        found: dict[str, Cell] = {}
        for name in sorted(names, key=lambda name: name not in BARE):  # bounds first
            found[name] = self._cell(name, rate, blocks, plans[name], found)
        return list(found.values())

    def _settled(self, name: str) -> float:
        """Seconds of a step without compute at a new rate; the hidden settle in their warm-up."""
        kind = kind_of(name)
        if name == ALONE or kind.warm_up:
            return 0.0
        try:
            return self._laboratory.settle(name, kind.steps, _BLOCK_TIMEOUT_SECONDS)["seconds"]
        except WorkerError as error:
            raise _FailedError(name, str(error)) from error

    def _plan(self, name: str, grid: Grid, settled: dict[str, float]) -> "_Plan":
        """How a block is run."""
        kind = kind_of(name)
        compute = 0.0 if name in BARE else self._blank.profile.compute_seconds
        transfer = settled.get(kind.bare or name, 0.0)
        seconds = max(compute, transfer, 1e-4)
        steps = max(kind.least, math.ceil(grid.block_seconds / seconds))
        # What is hidden leaves nothing in flight that could hold up the second step.
        free = not kind.in_step and transfer < compute
        warm_up = min(1, kind.warm_up) if free else kind.warm_up

        def whole(count: int) -> int:
            """Bytes are counted from the warm-up on: both are whole periods."""
            return kind.steps * math.ceil(count / kind.steps)

        return _Plan(whole(warm_up), whole(steps), _SPREAD * compute if free else 0.0)

    def _cell(
        self,
        name: str,
        rate: float,
        blocks: dict[str, list[Block]],
        plan: "_Plan",
        found: dict[str, Cell],
    ) -> Cell:
        kind, own = kind_of(name), blocks[name]
        cell = self._blank.cell(name, rate, None)

        def median(what: str, of: list[Block] = own) -> float:
            return statistics.median(block[what] for block in of)

        compute, step, sent = cell["compute_seconds"], median("seconds"), median("bytes_on_wire")
        bare = None if kind.bare is None else found.get(kind.bare)
        bare_seconds = None if bare is None else bare["step_seconds_median"]
        alone = median("seconds", blocks[ALONE]) if ALONE in blocks else None
        cell |= {
            "step_seconds": [_short(block["seconds"]) for block in own],
            "step_seconds_median": _short(step),
            **compared(name, step, compute, alone, bare_seconds),
            "bytes_on_wire": round(sent),
            "bound_seconds": _short(max(compute, 8 * sent / rate)),
            "bare_seconds": bare_seconds,
            "warm_up_steps": plan.warm_up,
            "steps_per_block": own[0]["steps_run"],
            "memory_bytes": round(self._memory_bytes[name]),
        }
        shares = ("cpu_seconds", "cpu_busy", "cpu_busy_by_others", "late_share", "uneven_share")
        cell |= {what: _short(median(what)) for what in shares}
        cell["marks"] = marks_of(cell, alone, bare)
        cell["marked"] = bool(cell["marks"])
        return cell


def compared(
    name: str, step: float, compute: float, alone: float | None, bare: float | None
) -> dict[str, float | None]:
    """What a step is held against; None where there is nothing to hold it against.

    Args:
        name: Of the contestant; a bare transfer hides nothing and is behind no bound.
        step: Seconds of its step.
        compute: Seconds that the replay is to take.
        alone: Seconds of a step without communication in the same place.
        bare: Seconds of the bare transfer; None says that none stands for it.
    """
    if name in BARE:
        return dict.fromkeys(("efficiency", "exposed_seconds", "exchange_bound_seconds"))
    bound = compute if name == ALONE else None if bare is None else max(compute, bare)
    return {
        "efficiency": _short(compute / step),
        "exposed_seconds": None if alone is None else _short(step - alone),
        "exchange_bound_seconds": None if bound is None else _short(bound),
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")
