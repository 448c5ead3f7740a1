"""The steps of a Chrome trace, rank by rank, as the page lets one go through them."""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ._format import number
from ._spans import Span, Spans

INTRODUCTION = (
    "What each worker did, and what was on its way meanwhile. Drag to move, hold Ctrl and turn the "
    "wheel to zoom. Perfetto (ui.perfetto.dev) shows all of trace.json."
)
_STEPS_SHOWN = 3
_MAX_RANKS = 16
_MAX_SPANS = 12_000
# These stop every worker: a window with one of them shows no ordinary step.
_UNUSUAL = frozenset({"evaluate", "average"})


class Step(NamedTuple):
    """A step of the lowest rank: its number and when it began and ended, in microseconds."""

    number: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of a rank, and the spans on it that reach into the window."""

    rank: int
    name: str
    spans: list[Span]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What the ranks did in a window of time; times are microseconds of the trace's axis.

    Attributes:
        description: What is shown, in words.
        start_us: Where the window starts.
        end_us: Where it ends.
        shown_us: Start and end of the part that is looked at first.
        steps: The steps in the window, those of the lowest rank.
        lanes: The rows, by rank.
    """

    description: str
    start_us: float
    end_us: float
    shown_us: tuple[float, float]
    steps: list[Step]
    lanes: list[Lane]

    def payload(self) -> dict[str, Any]:
        """The timeline as the page's script takes it, its times from the start of the window."""
        names: dict[str, int] = {}
        ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for lane in self.lanes:
            spans = [
                [
                    round(span.start_us - self.start_us, 1),
                    round(span.end_us - span.start_us, 1),
                    names.setdefault(span.name, len(names)),
                    span.attributes,
                ]
                for span in lane.spans
            ]
            ranks[lane.rank].append({"name": lane.name, "spans": spans})
        return {
            "length": round(self.end_us - self.start_us, 1),
            "shown": [round(at - self.start_us, 1) for at in self.shown_us],
            "steps": [
                [step.number, *(round(at - self.start_us, 1) for at in step[1:])]
                for step in self.steps
            ],
            "names": list(names),
            "ranks": [{"rank": rank, "lanes": lanes} for rank, lanes in ranks.items()],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: the milliseconds that each rank spent on what, in the part first shown."""
        start, end = self.shown_us
        spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        names: dict[str, None] = {}
        for lane in self.lanes:
            for span in lane.spans:
                inside_us = min(end, span.end_us) - max(start, span.start_us)
                if inside_us > 0:
                    spent[lane.rank][span.name] += inside_us / 1000
                    names[span.name] = None
        rows = [
            [f"rank {rank}", *(number(round(times[name], 3)) for name in names)]
            for rank, times in spent.items()
        ]
        return ["Rank", *names], rows


def timeline(trace: Spans, *, max_spans: int = _MAX_SPANS) -> Timeline | None:
    """Take the steps of a trace, or as many around its middle as a page can hold.

    The steps are those of the lowest rank; what the other ranks did meanwhile is shown beside
    them, whatever step they were at.

    Args:
        trace: What was recorded.
        max_spans: How many spans to take.

    Returns:
        The window and what is in it; None when the trace has no spans.
    """
    all_ranks = trace.ranks
    if not all_ranks:
        return None
    ranks = set(all_ranks[:_MAX_RANKS])
    spans = [span for span in trace.spans if span.rank in ranks]
    steps = _steps([span for span in spans if span.rank == all_ranks[0]])
    start, end = spans[0].start_us, max(span.end_us for span in spans)
    if steps:
        shown = _ordinary(steps, spans, all_ranks[0])
        kept = _fitting(steps, shown, spans, max_spans)
        start, end = kept[0].start_us, kept[-1].end_us
        shown_us = (shown[0].start_us, shown[-1].end_us)
    else:
        kept, shown, shown_us = [], [], (start, max(end, start + 1))
    end = max(end, start + 1)
    tracks: dict[tuple[int, int], list[Span]] = defaultdict(list)
    inside = [span for span in spans if span.start_us < end and span.end_us >= start]
    for span in inside[:max_spans]:
        tracks[span.rank, span.track].append(span)
    return Timeline(
        description=_describe(all_ranks, kept, shown, len(inside) > max_spans),
        start_us=start,
        end_us=end,
        shown_us=shown_us,
        steps=kept,
        lanes=[
            Lane(
                rank=rank,
                name=trace.track_names.get((rank, track), f"track {track}"),
                spans=found,
            )
            for (rank, track), found in sorted(tracks.items())
        ],
    )


def _steps(own: list[Span]) -> list[Step]:
    """The steps of one rank, each up to the start of the next, the last up to its last span."""
    starts: dict[int, float] = {}
    for span in own:
        step = span.attributes.get("step")
        if type(step) is int and span.name not in _UNUSUAL:
            starts[step] = min(span.start_us, starts.get(step, span.start_us))
    in_order = sorted(starts.items(), key=lambda item: item[1])
    if not in_order:
        return []
    end = max(span.end_us for span in own)
    found = [Step(step, at, after) for (step, at), (_, after) in pairwise(in_order)]
    return [*found, Step(in_order[-1][0], in_order[-1][1], end)]


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


def _describe(ranks: list[int], kept: list[Step], shown: list[Step], cut: bool) -> str:
    if kept:
        what = (
            f"Steps {kept[0].number} to {kept[-1].number} of rank {ranks[0]} and what went on "
            f"meanwhile, first {shown[0].number} to {shown[-1].number}"
        )
    else:
        what = "The whole trace"
    if len(ranks) > _MAX_RANKS:
        what += f", the first {_MAX_RANKS} of {len(ranks)} ranks"
    if cut:
        what += ", its beginning only"
    return f"{what}."
