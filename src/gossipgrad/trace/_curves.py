"""One curve after another out of the records of a run."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from ._format import is_number
from ._runs import Record, Run

MAX_POINTS = 500


class Point(NamedTuple):
    """A value, and when: by the axis of its chart, and in seconds since the start if known."""

    x: float
    y: float
    seconds: float | None


Curves = dict[int, list[Point]]
ReadValue = Callable[[Record], float | None]


def value_of(name: str) -> ReadValue:
    """Reads the value under `name`, None where it is no number."""

    def read(record: Record) -> float | None:
        value = record.get(name)
        return float(value) if is_number(value) else None

    return read


def by_rank(records_of_rank: dict[int, list[Record]], x: str, read: ReadValue) -> Curves:
    """A curve for each rank that has values."""
    curves = {
        rank: [
            Point(float(record[x]), value, _seconds(record))
            for record in records
            if is_number(record.get(x)) and (value := read(record)) is not None
        ]
        for rank, records in records_of_rank.items()
    }
    return {rank: points for rank, points in curves.items() if points}


def exposed_share(run: Run) -> Curves:
    """Of the time between two step records of a rank, the share that communication held up."""
    curves: Curves = {}
    for rank, records in run.steps.items():
        points = []
        for before, record in pairwise([{}, *records]):
            share = _interval_share(before, record)
            if share is not None and is_number(record.get("step")):
                points.append(Point(float(record["step"]), share, _seconds(record)))
        if points:
            curves[rank] = points
    return curves


def mean_of(curves: Curves) -> list[Point]:
    """The mean over the ranks that have a value at that x."""
    together: dict[float, list[Point]] = {}
    for points in curves.values():
        for point in points:
            together.setdefault(point.x, []).append(point)
    return [
        Point(x, fmean(point.y for point in points), _mean_seconds(points))
        for x, points in sorted(together.items())
    ]


def range_of(curves: Curves, group: int) -> tuple[list[Point], list[float]]:
    """The least value around each x as points, and the greatest beside them."""
    together: dict[float, list[Point]] = {}
    for points in curves.values():
        for point in points:
            together.setdefault(point.x, []).append(point)
    at = sorted(together)
    low, high = [], []
    for start in range(0, len(at), group):
        part = [point for x in at[start : start + group] for point in together[x]]
        x = fmean(at[start : start + group])
        low.append(Point(x, min(point.y for point in part), _mean_seconds(part)))
        high.append(max(point.y for point in part))
    return low, high


def agreed_on(curves: Curves) -> list[Point] | None:
    """What all ranks wrote alike, from any of them; None where two do not agree."""
    agreed: dict[float, Point] = {}
    for points in curves.values():
        for point in points:
            if agreed.setdefault(point.x, point).y != point.y:
                return None
    return [agreed[x] for x in sorted(agreed)]


def thin(points: Sequence[Point], group: int) -> list[Point]:
    """The mean of every `group` points in a row, so that a curve keeps its level and its trend."""
    if group == 1:
        return list(points)
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [
        Point(fmean(p.x for p in part), fmean(p.y for p in part), _mean_seconds(part))
        for part in groups
    ]


def group_size(curves: Curves) -> int:
    """How many points `thin` must take together for the longest curve to fit a screen."""
    return -(-max(map(len, curves.values()), default=0) // MAX_POINTS) or 1


def _interval_share(before: Record, record: Record) -> float | None:
    exposed = _difference(before, record, "exposed_seconds")
    steps = _difference(before, record, "step")
    training = _difference(before, record, "train_seconds")
    if training is None and steps is not None and is_number(record.get("step_seconds")):
        training = steps * float(record["step_seconds"])
    if exposed is None or training is None or training <= 0:
        return None
    return min(1.0, max(0.0, exposed / training))


def _difference(before: Record, record: Record, name: str) -> float | None:
    """How much a count has grown; the first record counts from 0."""
    now, then = record.get(name), before.get(name) if before else 0
    return float(now) - float(then) if is_number(now) and is_number(then) else None


def _seconds(record: Record) -> float | None:
    seconds = record.get("seconds")
    return float(seconds) if is_number(seconds) else None


def _mean_seconds(points: Sequence[Point]) -> float | None:
    known = [point.seconds for point in points if point.seconds is not None]
    return fmean(known) if len(known) == len(points) else None
