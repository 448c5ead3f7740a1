"""The curves of a run, thinned to what a screen can show."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from ._format import is_number, number, percent
from ._runs import Record, Run

Point = tuple[float, float]

_MAX_POINTS = 500
_MAX_TABLE_ROWS = 40
_MAX_TABLE_RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: a rank's own, the mean of all, or points measured exactly."""

    label: str
    role: Literal["rank", "mean", "exact"]
    points: list[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves over a common x, and how their values are written."""

    id: str
    title: str
    description: str
    x_label: str
    y_format: Literal["number", "percent"]
    series: list[Series]

    def payload(self) -> dict[str, Any]:
        """The chart as the page's script takes it."""
        return {
            "id": self.id,
            "xLabel": self.x_label,
            "yFormat": self.y_format,
            "series": [{"label": s.label, "role": s.role, "points": s.points} for s in self.series],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows with the same values, but no more than a reader would go through."""
        shown = [series for series in self.series if series.role != "rank"]
        if len(self.series) - len(shown) <= _MAX_TABLE_RANKS:
            shown = self.series
        write = percent if self.y_format == "percent" else number
        columns = [dict(series.points) for series in shown]
        kept = sorted({x for series in shown if series.role != "rank" for x in _spread(series)})
        head = [self.x_label.capitalize(), *(series.label for series in shown)]
        return head, [
            [number(x), *(write(column[x]) if x in column else "" for column in columns)]
            for x in kept
        ]


def charts(run: Run) -> list[Chart]:
    """The curves that the run has values for."""
    longest = max(map(len, run.steps.values()), default=0)
    group = -(-longest // _MAX_POINTS) or 1
    thinned = f" Each point of a line is the mean of {group} records." if group > 1 else ""
    accuracy = _exact(run.epochs, "epoch", "accuracy", "average of all replicas")
    accuracy_of = "Of the average of all replicas, after each epoch."
    if not _agree(run.epochs, "epoch", "accuracy"):
        accuracy = _by_rank(run.epochs, "epoch", "accuracy", group=1)
        accuracy_of = "After each epoch, as each worker found it (thin), and the mean (bold)."
    drawn = [
        Chart(
            id="loss",
            title="Training loss",
            description=(
                "Each worker's loss on its own batches (thin) and their mean (bold)." + thinned
            ),
            x_label="step",
            y_format="number",
            series=_by_rank(run.steps, "step", "loss", group),
        ),
        Chart(
            id="accuracy",
            title="Accuracy",
            description=accuracy_of,
            x_label="epoch",
            y_format="percent",
            series=accuracy,
        ),
        Chart(
            id="consensus",
            title="Consensus distance",
            description=(
                "How far the replicas are from their mean: each worker's estimate from its "
                "exchanges (thin), their mean (bold), and the exact distance (dots)." + thinned
            ),
            x_label="step",
            y_format="number",
            series=[
                *_by_rank(run.steps, "step", "consensus_distance_estimate", group),
                *_exact(run.epochs, "step", "consensus_distance", "exact"),
            ],
        ),
    ]
    return [chart for chart in drawn if chart.series]


def _by_rank(records_of_rank: dict[int, list[Record]], x: str, y: str, group: int) -> list[Series]:
    """A curve a rank, and the mean over the ranks that have a value at that x; both thinned."""
    curves = {
        rank: points
        for rank, records in records_of_rank.items()
        if (points := _points(records, x, y))
    }
    together = defaultdict(list)
    for points in curves.values():
        for at, value in points:
            together[at].append(value)
    mean = [(at, fmean(values)) for at, values in sorted(together.items())]
    series = [
        Series(label=f"rank {rank}", role="rank", points=_thin(points, group))
        for rank, points in curves.items()
    ]
    if mean:
        series.append(Series(label="mean", role="mean", points=_thin(mean, group)))
    return series


def _exact(records_of_rank: dict[int, list[Record]], x: str, y: str, label: str) -> list[Series]:
    """What all ranks agree on, from whichever rank wrote it."""
    agreed: dict[float, float] = {}
    for records in records_of_rank.values():
        agreed = dict(_points(records, x, y)) | agreed
    return [Series(label=label, role="exact", points=sorted(agreed.items()))] if agreed else []


def _agree(records_of_rank: dict[int, list[Record]], x: str, y: str) -> bool:
    """Whether no two ranks wrote different values at the same x."""
    values: dict[float, float] = {}
    return all(
        values.setdefault(at, value) == value
        for records in records_of_rank.values()
        for at, value in _points(records, x, y)
    )


def _points(records: list[Record], x: str, y: str) -> list[Point]:
    return [
        (float(record[x]), float(record[y]))
        for record in records
        if is_number(record.get(x)) and is_number(record.get(y))
    ]


def _thin(points: list[Point], group: int) -> list[Point]:
    """The mean of every `group` points in a row, so that a curve keeps its level and its trend."""
    if group == 1:
        return points
    groups = [points[i : i + group] for i in range(0, len(points), group)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in groups]


def _spread(series: Series) -> list[float]:
    """Where a series has points, or some of these from its whole range, the last among them."""
    xs = [x for x, _ in series.points]
    stride = -(-len(xs) // _MAX_TABLE_ROWS) or 1
    return [*xs[::stride], xs[-1]]
