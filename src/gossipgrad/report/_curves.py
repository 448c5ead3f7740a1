"""The curves of one run or of several, and the tables behind them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, NamedTuple

from ._figures import Metric, metric, ratio
from ._run import Record, Run
from ._text import Drawing, is_number, number, percent

_MAX_POINTS = 500
_MAX_TABLE_ROWS = 40
_MAX_TABLE_RANKS = 8
# More thin lines than this cannot be told apart: the range that they fill is drawn instead.
_MAX_LINES = 16


class Point(NamedTuple):
    """A value, its x, and the seconds since the start if known."""

    x: float
    y: float
    seconds: float | None


Points = dict[int, list[Point]]  # by rank


class Series(NamedTuple):
    """One curve, and how it is drawn."""

    label: str
    role: Literal["rank", "mean", "exact", "range"]
    points: list[Point]
    run: int | None = None
    upper: Sequence[float] = ()

    def payload(self) -> dict[str, Any]:
        """The series as the page's script takes it, six significant digits a value."""
        points: list[list[float | None]] = [[_short(value) for value in p] for p in self.points]
        for point, high in zip(points, self.upper, strict=False):
            point.append(_short(high))
        return {"label": self.label, "role": self.role, "run": self.run, "points": points}


def curves(runs: list[Run]) -> list[Drawing]:
    """The curves that the runs have values for: all ranks of one, or the means of several."""
    drawn = [
        _of_ranks(
            runs,
            lambda run: _by_rank(run.steps, "step", "loss"),
            key="loss",
            title="Training loss",
            alone="Each worker's loss on its own batches ({lines}) and the mean (bold).",
            several="Mean over the workers of the loss on their own batches.",
        ),
        _metric(runs),
        _consensus(runs),
        _chart(
            "disagreement",
            "Disagreement",
            "How far the replicas' predictions for the same test samples are apart, after each "
            "epoch: the Jensen-Shannon distance (square root of nats), mean over the samples.",
            _exact(runs, "disagreement", alone="all replicas"),
        ),
        _of_ranks(
            runs,
            _exposed_share,
            key="exposed",
            title="Exposed share",
            alone="Of the time in steps, what communication held up; less is better.",
            is_share=True,
        ),
        _of_ranks(
            runs,
            lambda run: _by_rank(run.epochs, "epoch", "samples_per_second"),
            key="throughput",
            title="Samples per second",
            alone="Of each worker ({lines}) and the mean (bold), evaluations left out.",
            several="Mean over the workers, in each epoch, evaluations left out.",
            x_label="epoch",
        ),
        _widths(runs),
    ]
    return [chart for chart in drawn if chart is not None]


def shared_metric(runs: list[Run]) -> Metric:
    """The metric of all runs; of runs with different ones their names, and a plain number."""
    found = list(dict.fromkeys(map(metric, runs)))
    if len(found) == 1:
        return found[0]
    return Metric(", ".join(dict.fromkeys(one.name for one in found)), ".4g")


def _chart(
    key: str,
    title: str,
    description: str,
    series: list[Series],
    *,
    x_label: str = "step",
    is_share: bool = False,
    write: Callable[[object], str] | None = None,
) -> Drawing | None:
    """A chart with its table, which has no more rows and columns than a reader can use."""
    if not series:
        return None
    lines = [each for each in series if each.role != "range"]
    shown = [each for each in lines if each.role != "rank"]
    if len(lines) - len(shown) <= _MAX_TABLE_RANKS:
        shown = lines
    write = write or (percent if is_share else number)
    columns = [{point.x: point.y for point in each.points} for each in shown]
    kept = sorted({x for each in shown if each.role != "rank" for x in _spread(each)})
    payload = {
        "id": key,
        "xLabel": x_label,
        "isShare": is_share,
        "series": [each.payload() for each in series],
    }
    head = [x_label.capitalize(), *(each.label for each in shown)]
    rows = [[number(x), *(write(one[x]) if x in one else "" for one in columns)] for x in kept]
    return Drawing(title, description, payload, head, rows)


def _of_ranks(
    runs: list[Run],
    points_of: Callable[[Run], Points],
    *,
    key: str,
    title: str,
    alone: str,
    several: str | None = None,
    x_label: str = "step",
    is_share: bool = False,
) -> Drawing | None:
    """A curve a rank and their mean, or the mean of each run; `{lines}` says how ranks look."""
    series, thinned = _lines(runs, points_of)
    text = alone.format(lines=_lines_are(runs)) if len(runs) == 1 else several or alone
    return _chart(key, title, text + thinned, series, x_label=x_label, is_share=is_share)


def _metric(runs: list[Run]) -> Drawing | None:
    series: list[Series] = []
    is_average = set()
    for index, run in _numbered(runs):
        points = _by_rank(run.epochs, "epoch", "accuracy")
        agreed = _agreed_on(points)
        is_average.add(agreed is not None)
        if agreed is None:
            series += _of_run(run, index, points, 1)
        elif agreed:
            label = "average of all replicas" if index is None else run.name
            series.append(Series(label, "exact", agreed, index))
    text = "Of the average of all replicas, after each epoch."
    if is_average == {False} and len(runs) == 1:
        lines = _lines_are(runs)
        text = f"After each epoch, as each worker found it ({lines}); the mean is bold."
    elif False in is_average:
        text = (
            "After each epoch, of the average of all replicas or, where ranks kept different "
            "ones, the mean of what they found."
        )
    shared = shared_metric(runs)
    return _chart(
        "metric",
        shared.name,
        text,
        series,
        x_label="epoch",
        is_share=shared.is_share,
        write=shared.write,
    )


def _consensus(runs: list[Run]) -> Drawing | None:
    estimate = "consensus_distance_estimate"
    series, thinned = _lines(runs, lambda run: _by_rank(run.steps, "step", estimate))
    what = "exact, after each epoch."
    if series and len(runs) > 1:
        what = "estimated from exchanges (lines) and exact (dots)."
    elif series:
        what = (
            f"each worker's estimate from its exchanges ({_lines_are(runs)}), the mean of these "
            "(bold), and the exact distance (dots)."
        )
    series += _exact(runs, "consensus_distance", alone="exact", several="{run}, exact")
    text = f"How far the replicas are from their mean: {what}{thinned}"
    return _chart("consensus", "Consensus distance", text, series)


def _widths(runs: list[Run]) -> Drawing | None:
    series = []
    for index, run in _numbered(runs):
        rank = min(run.steps, default=0)  # widths are equal on all ranks
        records = [r for r in run.steps.get(rank, []) if isinstance(r.get("widths"), dict)]
        for layer in records[0]["widths"] if records else ():
            points = [_point(one, one.get("step"), one["widths"].get(layer)) for one in records]
            label = layer if index is None else f"{run.name}, {layer}"
            known = [point for point in points if point is not None]
            series += [Series(label, "mean", known, index)] if known else []
    text = "Neurons of each layer that apoptosis may narrow."
    return _chart("widths", "Width by layer", text, series)


def _exact(runs: list[Run], name: str, *, alone: str, several: str = "{run}") -> list[Series]:
    """What was measured exactly after epochs, of each run that has it."""
    series = []
    for index, run in _numbered(runs):
        points = _by_rank(run.epochs, "step", name)
        if found := _agreed_on(points) or _mean_of(points):
            label = alone if index is None else several.format(run=run.name)
            series.append(Series(label, "exact", found, index))
    return series


def _lines(runs: list[Run], points_of: Callable[[Run], Points]) -> tuple[list[Series], str]:
    """The series of all runs, and a sentence on how they were thinned if they were."""
    found = [points_of(run) for run in runs]
    longest = max((len(points) for its in found for points in its.values()), default=0)
    group = -(-longest // _MAX_POINTS) or 1
    series = [
        line
        for (index, run), its in zip(_numbered(runs), found, strict=True)
        for line in _of_run(run, index, its, group)
    ]
    return series, f" Each point of a line is the mean of {group} records." if group > 1 else ""


def _of_run(run: Run, index: int | None, points: Points, group: int) -> list[Series]:
    """Ranks and mean of the only run, or the mean of one of several; thinned."""
    series: list[Series] = []
    if index is None and len(points) > _MAX_LINES:
        parts = [[p for at_x in part for p in at_x] for part in _groups(_by_x(points), group)]
        low = [_mean_point(part)._replace(y=min(p.y for p in part)) for part in parts]
        high = [max(p.y for p in part) for part in parts]
        series.append(Series("least to greatest", "range", low, upper=high))
    elif index is None:
        series += [
            Series(f"rank {rank}", "rank", _thin(its, group)) for rank, its in points.items()
        ]
    if mean := _mean_of(points):
        label = "mean" if index is None else run.name
        series.append(Series(label, "mean", _thin(mean, group), index))
    return series


def _by_rank(records_of_rank: dict[int, list[Record]], x: str, name: str) -> Points:
    """The points of each rank that has numbers under `name`."""
    return _known(
        (rank, [_point(one, one.get(x), one.get(name)) for one in records])
        for rank, records in records_of_rank.items()
    )


def _exposed_share(run: Run) -> Points:
    """Of the time between two step records of a rank, the share that communication held up."""

    def growth(name: str, before: Record, record: Record) -> float | None:
        now, then = record.get(name), before.get(name) if before else 0
        return now - then if is_number(now) and is_number(then) else None

    def point(before: Record, record: Record) -> Point | None:
        exposed, training = (
            growth(name, before, record) for name in ("exposed_seconds", "train_seconds")
        )
        share = ratio(exposed, training)
        return _point(
            record, record.get("step"), None if share is None else min(1.0, max(0.0, share))
        )

    return _known(
        (rank, [point(before, record) for before, record in pairwise([{}, *records])])
        for rank, records in run.steps.items()
    )


def _point(record: Record, x: object, y: object) -> Point | None:
    if not (is_number(x) and is_number(y)):
        return None
    seconds = record.get("seconds")
    return Point(float(x), float(y), float(seconds) if is_number(seconds) else None)


def _known(found: Iterable[tuple[int, list[Point | None]]]) -> Points:
    points = {rank: [one for one in its if one is not None] for rank, its in found}
    return {rank: its for rank, its in points.items() if its}


def _by_x(points: Points) -> list[list[Point]]:
    """The points of all ranks at each x, in order."""
    together: dict[float, list[Point]] = {}
    for its in points.values():
        for point in its:
            together.setdefault(point.x, []).append(point)
    return [together[x] for x in sorted(together)]


def _mean_of(points: Points) -> list[Point]:
    """The mean over the ranks that have a value at that x."""
    return [_mean_point(at_x) for at_x in _by_x(points)]


def _agreed_on(points: Points) -> list[Point] | None:
    """The curve that all ranks have alike; None where two differ."""
    at_each = _by_x(points)
    if any(point.y != at_x[0].y for at_x in at_each for point in at_x):
        return None
    return [at_x[0] for at_x in at_each]


def _thin(points: list[Point], group: int) -> list[Point]:
    """The mean of every `group` points in a row, so that a curve keeps its level and its trend."""
    return points if group == 1 else [_mean_point(part) for part in _groups(points, group)]


def _groups(values: list[Any], size: int) -> list[list[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _mean_point(points: Sequence[Point]) -> Point:
    known = [point.seconds for point in points if point.seconds is not None]
    seconds = fmean(known) if len(known) == len(points) else None
    return Point(fmean(p.x for p in points), fmean(p.y for p in points), seconds)


def _lines_are(runs: list[Run]) -> str:
    """How single workers are drawn."""
    return "thin" if len(runs[0].steps) <= _MAX_LINES else "their range"


def _numbered(runs: list[Run]) -> list[tuple[int | None, Run]]:
    """The runs with their indices, the only one with None."""
    return [(None if len(runs) == 1 else index, run) for index, run in enumerate(runs)]


def _spread(series: Series) -> list[float]:
    """Where a series has points, or some of these from its whole range, the last among them."""
    xs = [point.x for point in series.points]
    stride = -(-len(xs) // _MAX_TABLE_ROWS) or 1
    return [*xs[::stride], xs[-1]]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
