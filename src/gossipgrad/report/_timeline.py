"""The steps of a Chrome trace, rank by rank, as the page lets one go through them."""

from bisect import bisect_left
from collections import defaultdict
from typing import Any, NamedTuple

from ._format import number
from ._html import Drawing
from ._runs import Span, Spans

INTRODUCTION = (
    "What each worker did, and what was on its way meanwhile. Drag to move, hold Ctrl and turn the "
    "wheel to zoom. Perfetto (ui.perfetto.dev) shows all of trace.json."
)
_STEPS_SHOWN = 3
_MAX_RANKS = 16
# These stop every worker: a window with one of them shows no ordinary step.
_UNUSUAL = frozenset({"evaluate", "average"})


class Step(NamedTuple):
    """A step of the lowest rank: its number, start and end, in microseconds."""

    number: int
    start_us: float
    end_us: float


def timeline(trace: Spans, *, max_spans: int) -> Drawing | None:
    """The steps of a trace, or as many around its middle as a page can hold.

    The steps are those of the lowest rank; the spans of the other ranks at the same time are shown
    beside them, whatever step they were at.

    Args:
        trace: What was recorded.
        max_spans: How many spans to include.

    Returns:
        None when the trace has no spans.
    """
    ranks = trace.ranks
    if not ranks:
        return None
    spans = [span for span in trace.spans if span.rank in set(ranks[:_MAX_RANKS])]
    steps = _steps([span for span in spans if span.rank == ranks[0]])
    start, end = spans[0].start_us, max(span.end_us for span in spans)
    kept: list[Step] = []
    shown: list[Step] = []
    if steps:
        shown = _ordinary(steps, spans, ranks[0])
        kept = _fitting(steps, shown, spans, max_spans)
        start, end = kept[0].start_us, kept[-1].end_us
    end = max(end, start + 1)
    shown_us = (shown[0].start_us, shown[-1].end_us) if shown else (start, end)
    tracks: dict[tuple[int, int], list[Span]] = defaultdict(list)
    inside = [span for span in spans if span.start_us < end and span.end_us >= start]
    for span in inside[:max_spans]:
        tracks[span.rank, span.track].append(span)
    head, rows = _table(tracks, shown_us)
    return Drawing(
        title="Timeline",
        description=_describe(ranks, kept, shown, is_cut=len(inside) > max_spans),
        payload=_payload(trace, tracks, kept, (start, end), shown_us),
        head=head,
        rows=rows,
    )


def _payload(
    trace: Spans,
    tracks: dict[tuple[int, int], list[Span]],
    steps: list[Step],
    window_us: tuple[float, float],
    shown_us: tuple[float, float],
) -> dict[str, Any]:
    """The timeline as the page's script takes it, its times from the start of the window."""
    names: dict[str, int] = {}
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def since(at_us: float) -> float:
        return round(at_us - window_us[0], 1)

    for (rank, track), found in sorted(tracks.items()):
        spans = [
            [
                since(span.start_us),
                round(span.end_us - span.start_us, 1),
                names.setdefault(span.name, len(names)),
                span.attributes,
            ]
            for span in found
        ]
        name = trace.track_names.get((rank, track), f"track {track}")
        ranks[rank].append({"name": name, "spans": spans})
    return {
        "length": since(window_us[1]),
        "shown": [*map(since, shown_us)],
        "steps": [[step.number, since(step.start_us), since(step.end_us)] for step in steps],
        "names": list(names),
        "ranks": [{"rank": rank, "lanes": lanes} for rank, lanes in ranks.items()],
    }


def _table(
    tracks: dict[tuple[int, int], list[Span]], shown_us: tuple[float, float]
) -> tuple[list[str], list[list[str]]]:
    """The milliseconds that each rank spent on what, in the part first shown."""
    start, end = shown_us
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names: dict[str, None] = {}
    for (rank, _), found in sorted(tracks.items()):
        for span in found:
            inside_us = min(end, span.end_us) - max(start, span.start_us)
            if inside_us > 0:
                spent[rank][span.name] += inside_us / 1000
                names[span.name] = None
    return ["Rank", *names], [
        [f"rank {rank}", *(number(round(times[name], 3)) for name in names)]
        for rank, times in spent.items()
    ]


def _steps(own: list[Span]) -> list[Step]:
    """The steps of one rank, each up to the start of the next, the last up to its last span."""
    starts: dict[int, float] = {}
    for span in own:
        step = span.attributes.get("step")
        if type(step) is int and span.name not in _UNUSUAL:
            starts[step] = min(span.start_us, starts.get(step, span.start_us))
    in_order = sorted(starts.items(), key=lambda item: item[1])
    ends = [*(at for _, at in in_order[1:]), max((span.end_us for span in own), default=0.0)]
    return [Step(step, at, end) for (step, at), end in zip(in_order, ends, strict=False)]


def _ordinary(steps: list[Step], spans: list[Span], rank: int) -> list[Step]:
    """A few steps in a row near the middle, without an evaluation among them if there are any."""
    # The last step reaches to the end of the trace, which may be far off.
    windows = [steps[i : i + _STEPS_SHOWN] for i in range(len(steps) - _STEPS_SHOWN)] or [steps]
    unusual = [span for span in spans if span.rank == rank and span.name in _UNUSUAL]
    middle = len(windows) // 2
    for i in sorted(range(len(windows)), key=lambda i: abs(i - middle)):
        start, end = windows[i][0].start_us, windows[i][-1].end_us
        if not any(span.start_us < end and span.end_us > start for span in unusual):
            return windows[i]
    return windows[middle]


def _fitting(steps: list[Step], shown: list[Step], spans: list[Span], max_spans: int) -> list[Step]:
    """As many steps around those shown first as have no more spans than allowed."""
    starts = [span.start_us for span in spans]
    counts = [
        bisect_left(starts, step.end_us) - bisect_left(starts, step.start_us) for step in steps
    ]
    first = last = steps.index(shown[0])
    total = counts[first]
    while True:
        after, before = last + 1, first - 1
        if after < len(steps) and total + counts[after] <= max_spans:
            last, total = after, total + counts[after]
        elif before >= 0 and total + counts[before] <= max_spans:
            first, total = before, total + counts[before]
        else:
            return steps[first : last + 1]


def _describe(ranks: list[int], kept: list[Step], shown: list[Step], *, is_cut: bool) -> str:
    what = "The whole trace"
    if kept:
        what = (
            f"Steps {kept[0].number} to {kept[-1].number} of rank {ranks[0]} and what went on "
            f"meanwhile, first {shown[0].number} to {shown[-1].number}"
        )
    if len(ranks) > _MAX_RANKS:
        what += f", the first {_MAX_RANKS} of {len(ranks)} ranks"
    return f"{what}{', its beginning only' * is_cut}."
