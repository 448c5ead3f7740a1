"""A few consecutive steps of a Chrome trace, rank by rank."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ._format import number
from ._runs import Record

_STEPS_SHOWN = 3
_MAX_RANKS = 16
_MAX_SPANS = 4000
# These stop every worker: a window with one of them shows no ordinary step.
_UNUSUAL = frozenset({"evaluate", "average"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of a rank, and the complete events on it that reach into the window."""

    rank: int
    name: str
    spans: list[Record]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What all ranks did in a window of time; times are microseconds of the trace's axis."""

    description: str
    start_us: float
    end_us: float
    lanes: list[Lane]

    def payload(self) -> dict[str, Any]:
        """The timeline as the page's script takes it, its times from the start of the window."""
        ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for lane in self.lanes:
            spans = [
                [
                    round(span["ts"] - self.start_us, 1),
                    round(span["dur"], 1),
                    span["name"],
                    span.get("args", {}),
                ]
                for span in lane.spans
            ]
            ranks[lane.rank].append({"name": lane.name, "spans": spans})
        return {
            "length": round(self.end_us - self.start_us, 1),
            "ranks": [{"rank": rank, "lanes": lanes} for rank, lanes in ranks.items()],
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows: the milliseconds of the window that each rank spent on what."""
        spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        names: dict[str, None] = {}
        for lane in self.lanes:
            for span in lane.spans:
                inside_us = min(self.end_us, _end(span)) - max(self.start_us, span["ts"])
                spent[lane.rank][span["name"]] += inside_us / 1000
                names[span["name"]] = None
        rows = [
            [f"rank {rank}", *(number(round(times[name], 3)) for name in names)]
            for rank, times in spent.items()
        ]
        return ["Rank", *names], rows


def timeline(events: list[Record]) -> Timeline | None:
    """Pick some ordinary steps from the middle of a trace.

    The steps are those of the lowest rank; what the other ranks did meanwhile is shown beside
    them, whatever step they were at.

    Args:
        events: Chrome trace events, those of `merge_traces`.

    Returns:
        The window and what is in it; None when the trace has no spans.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    if not spans:
        return None
    first_step, start, end = _window(spans)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    ranks = sorted({span["pid"] for span in spans})
    tracks: dict[tuple[int, int], list[Record]] = defaultdict(list)
    inside = (span for span in spans if span["ts"] < end and _end(span) > start)
    for span in sorted(inside, key=lambda span: span["ts"])[:_MAX_SPANS]:
        if span["pid"] in ranks[:_MAX_RANKS]:
            tracks[span["pid"], span["tid"]].append(span)
    return Timeline(
        description=_describe(ranks, first_step),
        start_us=start,
        end_us=end,
        lanes=[
            Lane(rank=pid, name=names.get((pid, tid), f"track {tid}"), spans=found)
            for (pid, tid), found in sorted(tracks.items())
        ],
    )


def _window(spans: list[Record]) -> tuple[int | None, float, float]:
    """The first of the steps shown, if it is steps, and where the window starts and ends."""
    lowest = min(span["pid"] for span in spans)
    own = [span for span in spans if span["pid"] == lowest]
    starts: dict[int, float] = {}
    for span in own:
        step = span.get("args", {}).get("step")
        if isinstance(step, int) and span["name"] not in _UNUSUAL:
            starts[step] = min(span["ts"], starts.get(step, span["ts"]))
    windows = [
        (step, start, starts[step + _STEPS_SHOWN])
        for step, start in sorted(starts.items())
        if step + _STEPS_SHOWN in starts
    ]
    if not windows:
        start = min(span["ts"] for span in spans)
        return None, start, max(start + 1, *(_end(span) for span in spans))
    unusual = [span for span in own if span["name"] in _UNUSUAL]
    middle = len(windows) // 2
    for i in sorted(range(len(windows)), key=lambda i: abs(i - middle)):
        _, start, end = windows[i]
        if not any(span["ts"] < end and _end(span) > start for span in unusual):
            return windows[i]
    return windows[middle]


def _describe(ranks: list[int], first_step: int | None) -> str:
    if first_step is None:
        what = "The whole trace"
    else:
        last_step = first_step + _STEPS_SHOWN - 1
        what = f"Steps {first_step} to {last_step} of rank {ranks[0]} and what went on meanwhile"
    if len(ranks) > _MAX_RANKS:
        what += f", the first {_MAX_RANKS} of {len(ranks)} ranks"
    return f"{what}. Perfetto (ui.perfetto.dev) shows all of trace.json."


def _end(span: Record) -> float:
    return span["ts"] + span["dur"]
