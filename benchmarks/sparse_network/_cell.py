"""Measuring one place: a session of ours plans, then all contestants take turns."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.network._contestants import Surroundings
from benchmarks.network._laboratory import Laboratory, WorkerError
from benchmarks.network._marks import marks_of
from benchmarks.network._where import where

from ._grid import Place
from ._kinds import ALONE, KINDS, OPTIMAL
from ._plans import Measured, Plans
from ._selection import Curve

_PLAN_SECONDS = 180.0
_BLOCK_TIMEOUT_SECONDS = 240.0
_BLOCK_SECONDS = 0.5
_FAR_TIMES = 4.0  # who is predicted to take so much longer than the best has one turn
_DDP_BYTES = (1 << 20, 25 << 20)  # torch's first bucket, and the others, at full size
_FIRST_STEPS = 2  # links are made, DDP rebuilds its buckets

Cell = dict[str, Any]


class SparseLaboratory(Laboratory):
    """The laboratory of gossip, with contestants of its own."""

    worker = "benchmarks.sparse_network._worker"

    def told(self, name: str) -> Measured:
        """What a session that plans itself has measured."""
        return self._everyone("told", (name,), _PLAN_SECONDS)[0]


def measure_place(
    laboratory: SparseLaboratory,
    place: Place,
    curves: dict[str, Curve],
    say: Callable[[str], None] = print,
) -> Cell:
    """All contestants of a place, in turns; who fails says why, and the others go on without.

    Args:
        laboratory: Where.
        place: What.
        curves: Seconds of selection at full size, for the place's density.
        say: Tells how it goes on.
    """
    failed: dict[str, str] = {}
    while True:
        try:
            return _Measuring(laboratory, place, curves, failed, say).cell()
        except _FailedError as error:
            say(f"{error.name} failed: {error}")
            if error.name in failed or error.name == OPTIMAL:
                raise WorkerError(f"{place}: {error.name}: {error}") from error
            failed[error.name] = str(error)
            laboratory.restart()


class _FailedError(Exception):
    """A contestant cannot go on, and with it the workers."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class _Measuring:
    def __init__(
        self,
        laboratory: SparseLaboratory,
        place: Place,
        curves: dict[str, Curve],
        failed: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._laboratory = laboratory
        self._place = place
        self._curves = curves
        self._failed = failed
        self._say = say
        self._profile = place.scaled()

    def cell(self) -> Cell:
        laboratory, place = self._laboratory, self._place
        laboratory.join(place.world_size)
        laboratory.set_rate(None)  # making one sends its replica
        self._make(OPTIMAL, None)
        laboratory.set_rate(place.link_rate)
        told = self._tried(OPTIMAL, lambda: laboratory.told(OPTIMAL))
        self._say(f"{place}: planned")
        surroundings = Surroundings(profile=self._profile, size_factor=place.size_factor)
        first, others = _DDP_BYTES
        plans = Plans(
            told,
            self._curves,
            time_factor=place.time_factor,
            size_factor=place.size_factor,
            buckets_bytes=(round(first * place.size_factor), surroundings.bucket_bytes(others)),
        )
        found = {name: self._blank(name, plans, told) for name in place.contestants}
        names = self._worth(found)
        laboratory.set_rate(None)
        for name in names:
            if name != OPTIMAL:
                made = {"plan": found[name]["plan"], "names": told["names"]}
                self._make(name, made if found[name]["plan"] else None)
            self._tried(name, lambda name=name: self._settle(name))
            self._say(f"{place}: {name} is there")
        laboratory.set_rate(place.link_rate)
        self._measure(names, found)
        laboratory.leave()
        for of in found.values():
            of["plan"] = _told(of["plan"])
        return {
            **place.key(),
            "link_rate_bits_per_second": place.link_rate,
            "compute_seconds": self._profile.compute_seconds,
            "measured": {key: told[key] for key in ("backward_seconds", "sizes", "costs")},
            "refused": told["refused"],
            "contestants": found,
            "where": where(),
        }

    def _blank(self, name: str, plans: Plans, told: Measured) -> dict[str, Any]:
        plan = plans.of(name)
        sends = plan is not None
        around = self._profile.forward_seconds + self._profile.optimizer_seconds
        return {
            "selection": KINDS[name].selection if "sparse" in KINDS[name].methods else None,
            "plan": plan.to_json() if sends else None,
            "groups": len(plan.groups) if sends else 0,
            "sparse_groups": sum(g.method == "sparse" for g in plan.groups) if sends else 0,
            "predicted_seconds": (
                around + told["first_gradient_seconds"] + plan.finish_seconds
                if sends
                else self._profile.compute_seconds
            ),
            "gap": plan.gap if name.startswith(OPTIMAL) and sends else None,
            "step_seconds": [],
            "error": self._failed.get(name),
        }

    def _worth(self, found: dict[str, dict[str, Any]]) -> list[str]:
        """Who is measured: none that failed, or is predicted to be far behind."""
        best = min(cell["predicted_seconds"] for name, cell in found.items() if name != ALONE)
        most = (self._place.most_times or math.inf) * best
        for cell in found.values():
            if cell["error"] is None and cell["predicted_seconds"] > most:
                cell["error"] = "left out: predicted to be far behind"
        return [name for name, cell in found.items() if cell["error"] is None]

    def _measure(self, names: list[str], found: dict[str, dict[str, Any]]) -> None:
        blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        best = min(found[name]["predicted_seconds"] for name in names if name != ALONE)
        near = [name for name in names if found[name]["predicted_seconds"] <= _FAR_TIMES * best]
        for number in range(self._place.blocks):
            taking_turns = near if number else names
            turn = number % len(taking_turns)
            for name in (*taking_turns[turn:], *taking_turns[:turn]):
                predicted = found[name]["predicted_seconds"]
                steps = max(1, math.ceil(_BLOCK_SECONDS / predicted))
                blocks[name].append(
                    self._tried(
                        name,
                        lambda name=name, steps=steps: self._laboratory.run(
                            name, 0, steps, _BLOCK_TIMEOUT_SECONDS
                        ),
                    )
                )
        alone = None
        if ALONE in blocks:
            alone = statistics.median(block["seconds"] for block in blocks[ALONE])
        for name, own in blocks.items():
            found[name] |= _figures(own, self._profile.compute_seconds, alone)

    def _make(self, name: str, planned: dict[str, Any] | None) -> None:
        place = self._place
        more = (self._curves, place.time_factor, place.density, planned)
        profile = self._profile.to_json()
        self._tried(name, lambda: self._laboratory.make(name, profile, place.size_factor, *more))

    def _settle(self, name: str) -> None:
        self._laboratory.settle(name, _FIRST_STEPS, _BLOCK_TIMEOUT_SECONDS)

    def _tried(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except WorkerError as error:
            raise _FailedError(name, str(error)) from error


def _told(plan: dict[str, Any] | None) -> str | None:
    """In words that take one line of a file."""
    if plan is None:
        return None
    return ", ".join(f"{start}-{stop} {method}" for start, stop, method in plan["groups"])


def _figures(
    blocks: list[dict[str, Any]], compute_seconds: float, alone: float | None
) -> dict[str, Any]:
    shares = ("cpu_seconds", "cpu_busy", "cpu_busy_by_others", "late_share", "uneven_share")
    cell: dict[str, Any] = {
        "step_seconds": [_short(block["seconds"]) for block in blocks],
        "step_seconds_median": _short(statistics.median(b["seconds"] for b in blocks)),
        "bytes_on_wire": round(statistics.median(b["bytes_on_wire"] for b in blocks)),
        "steps_per_block": blocks[0]["steps_run"],
        "clocks": {
            what: _short(statistics.median(block["clocks"][what] for block in blocks))
            for what in blocks[0]["clocks"]
        },
        **{what: _short(statistics.median(b[what] for b in blocks)) for what in shares},
    }
    cell["marks"] = marks_of({**cell, "compute_seconds": compute_seconds}, alone)
    return cell


def _short(value: float) -> float:
    return float(f"{value:.5g}")
