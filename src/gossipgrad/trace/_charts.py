"""The charts of one run or of several, and the tables behind them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ._curves import (
    Curves,
    Point,
    agreed_on,
    by_rank,
    exposed_share,
    group_size,
    mean_of,
    range_of,
    thin,
    value_of,
)
from ._format import number, percent
from ._runs import Run

_MAX_TABLE_ROWS = 40
_MAX_TABLE_RANKS = 8
# More thin lines than this are a carpet: the range they fill is drawn instead.
_MAX_LINES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: a rank's own, the mean of all, their range, or points measured exactly.

    Attributes:
        label: What it is, in words.
        role: How it is drawn.
        points: Where it goes through; the lower edge of a range.
        upper: The upper edge of a range, as many values as points.
        run: Which of several runs it is of; None if there is one.
    """

    label: str
    role: Literal["rank", "mean", "exact", "range"]
    points: list[Point]
    upper: list[float] = field(default_factory=list)
    run: int | None = None

    def payload(self) -> dict[str, Any]:
        """The series as the page's script takes it, six significant digits a value."""
        points: list[list[float | None]] = [[_short(value) for value in p] for p in self.points]
        for point, high in zip(points, self.upper, strict=False):
            point.append(_short(high))
        return {"label": self.label, "role": self.role, "run": self.run, "points": points}


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
            "series": [series.payload() for series in self.series],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows with the same values, but no more than a reader would go through."""
        lines = [series for series in self.series if series.role != "range"]
        shown = [series for series in lines if series.role != "rank"]
        if len(lines) - len(shown) <= _MAX_TABLE_RANKS:
            shown = lines
        write = percent if self.y_format == "percent" else number
        columns = [{point.x: point.y for point in series.points} for series in shown]
        kept = sorted({x for series in shown if series.role != "rank" for x in _spread(series)})
        head = [self.x_label.capitalize(), *(series.label for series in shown)]
        return head, [
            [number(x), *(write(column[x]) if x in column else "" for column in columns)]
            for x in kept
        ]


def charts(runs: list[Run]) -> list[Chart]:
    """The curves that the runs have values for: all ranks of one, or the means of several."""
    drawn = [_loss(runs), _accuracy(runs), _consensus(runs), _disagreement(runs), _exposed(runs)]
    return [chart for chart in (*drawn, _throughput(runs), _widths(runs)) if chart.series]


def _loss(runs: list[Run]) -> Chart:
    series, thinned = _lines(runs, lambda run: by_rank(run.steps, "step", value_of("loss")))
    what = "Mean over the workers of the loss on their own batches."
    if len(runs) == 1:
        what = f"Each worker's loss on its own batches ({_lines_are(runs)}) and the mean (bold)."
    return Chart(
        id="loss",
        title="Training loss",
        description=what + thinned,
        x_label="step",
        y_format="number",
        series=series,
    )


def _accuracy(runs: list[Run]) -> Chart:
    series: list[Series] = []
    whose = set()
    for index, run in _numbered(runs):
        curves = by_rank(run.epochs, "epoch", value_of("accuracy"))
        agreed = agreed_on(curves)
        whose.add(agreed is not None)
        if agreed is None:
            series += _of_run(run, index, curves, 1)
        elif agreed:
            label = "average of all replicas" if index is None else run.name
            series.append(Series(label=label, role="exact", points=agreed, run=index))
    description = "Of the average of all replicas, after each epoch."
    if whose == {False} and len(runs) == 1:
        lines_are = _lines_are(runs)
        description = f"After each epoch, as each worker found it ({lines_are}); the mean is bold."
    elif False in whose:
        description = (
            "After each epoch, of the average of all replicas or, where ranks kept different "
            "ones, the mean of what they found."
        )
    return Chart(
        id="accuracy",
        title="Accuracy",
        description=description,
        x_label="epoch",
        y_format="percent",
        series=series,
    )


def _consensus(runs: list[Run]) -> Chart:
    estimate = value_of("consensus_distance_estimate")
    series, thinned = _lines(runs, lambda run: by_rank(run.steps, "step", estimate))
    is_estimated = bool(series)
    for index, run in _numbered(runs):
        curves = by_rank(run.epochs, "step", value_of("consensus_distance"))
        exact = agreed_on(curves) or mean_of(curves)
        label = "exact" if index is None else f"{run.name}, exact"
        if exact:
            series.append(Series(label=label, role="exact", points=exact, run=index))
    what = "How far the replicas are from their mean: "
    if not is_estimated:
        what += "exact, after each epoch."
    elif len(runs) == 1:
        what += (
            f"each worker's estimate from its exchanges ({_lines_are(runs)}), the mean of these "
            "(bold), and the exact distance (dots)."
        )
    else:
        what += "estimated from exchanges (lines) and exact (dots)."
    return Chart(
        id="consensus",
        title="Consensus distance",
        description=what + thinned,
        x_label="step",
        y_format="number",
        series=series,
    )


def _disagreement(runs: list[Run]) -> Chart:
    series = []
    for index, run in _numbered(runs):
        curves = by_rank(run.epochs, "step", value_of("disagreement"))
        if points := agreed_on(curves) or mean_of(curves):
            label = "all replicas" if index is None else run.name
            series.append(Series(label=label, role="exact", points=points, run=index))
    return Chart(
        id="disagreement",
        title="Disagreement",
        description="How far the replicas' predictions for the same test samples are apart, after "
        "each epoch: the Jensen-Shannon distance (square root of nats), mean over the samples.",
        x_label="step",
        y_format="number",
        series=series,
    )


def _exposed(runs: list[Run]) -> Chart:
    series, thinned = _lines(runs, exposed_share)
    return Chart(
        id="exposed",
        title="Exposed share",
        description="Of the time in steps, what communication held up; less is better." + thinned,
        x_label="step",
        y_format="percent",
        series=series,
    )


def _throughput(runs: list[Run]) -> Chart:
    rate = value_of("samples_per_second")
    series, thinned = _lines(runs, lambda run: by_rank(run.epochs, "epoch", rate))
    what = "Mean over the workers, in each epoch, evaluations left out."
    if len(runs) == 1:
        what = f"Of each worker ({_lines_are(runs)}) and the mean (bold), evaluations left out."
    return Chart(
        id="throughput",
        title="Samples per second",
        description=what + thinned,
        x_label="epoch",
        y_format="number",
        series=series,
    )


def _widths(runs: list[Run]) -> Chart:
    series = []
    for index, run in _numbered(runs):
        rank = min(run.steps, default=0)  # widths are equal on all ranks
        records = [r for r in run.steps.get(rank, []) if isinstance(r.get("widths"), dict)]
        for layer in records[0]["widths"] if records else ():
            curve = by_rank({rank: records}, "step", lambda r, layer=layer: r["widths"].get(layer))
            label = layer if index is None else f"{run.name}, {layer}"
            series += [
                Series(label=label, role="mean", points=points, run=index)
                for points in curve.values()
            ]
    return Chart(
        id="widths",
        title="Width by layer",
        description="Neurons of each layer that apoptosis may narrow.",
        x_label="step",
        y_format="number",
        series=series,
    )


def _lines(runs: list[Run], curves_of: Callable[[Run], Curves]) -> tuple[list[Series], str]:
    """The series of all runs, and a sentence on how they were thinned if they were."""
    curves = [curves_of(run) for run in runs]
    group = max(map(group_size, curves))
    series = [
        line
        for (index, run), its in zip(_numbered(runs), curves, strict=True)
        for line in _of_run(run, index, its, group)
    ]
    return series, f" Each point of a line is the mean of {group} records." if group > 1 else ""


def _of_run(run: Run, index: int | None, curves: Curves, group: int) -> list[Series]:
    """Ranks and mean of the only run, or the mean of one of several; thinned."""
    series: list[Series] = []
    if index is None and len(curves) > _MAX_LINES:
        low, high = range_of(curves, group)
        label = "least to greatest"
        series.append(Series(label=label, role="range", points=low, upper=high))
    elif index is None:
        series += [
            Series(label=f"rank {rank}", role="rank", points=thin(points, group))
            for rank, points in curves.items()
        ]
    if mean := mean_of(curves):
        label = "mean" if index is None else run.name
        series.append(Series(label=label, role="mean", points=thin(mean, group), run=index))
    return series


def _lines_are(runs: list[Run]) -> str:
    """How the single workers are drawn."""
    return "thin" if len(runs[0].steps) <= _MAX_LINES else "their range"


def _numbered(runs: list[Run]) -> list[tuple[int | None, Run]]:
    """The runs with their numbers, the only one with None."""
    return [(None if len(runs) == 1 else index, run) for index, run in enumerate(runs)]


def _spread(series: Series) -> list[float]:
    """Where a series has points, or some of these from its whole range, the last among them."""
    xs = [point.x for point in series.points]
    stride = -(-len(xs) // _MAX_TABLE_ROWS) or 1
    return [*xs[::stride], xs[-1]]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
