"""A few consecutive steps of a Chrome trace, rank by rank."""

from collections import defaultdict
from typing import Any

from ._runs import Record

_STEPS_SHOWN = 3
_MAX_RANKS = 16
_MAX_SPANS = 4000
# These stop every worker: a window with one of them shows no ordinary step.
_UNUSUAL = frozenset({"evaluate", "average"})


def timeline(events: list[Record]) -> dict[str, Any] | None:
    """Pick some ordinary steps from the middle of a trace, as the page's script takes them.

    The steps are those of the lowest rank; what the other ranks did meanwhile is shown beside
    them, whatever step they were at.

    Args:
        events: Chrome trace events, those of `merge_traces`.

    Returns:
        Steps, length of the window and lanes of spans, all times in microseconds from its start;
        None when there is nothing to show.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    if not spans:
        return None
    first_step, start, end = _window(spans)
    ranks = sorted({span["pid"] for span in spans})[:_MAX_RANKS]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    lanes: dict[tuple[int, int], list[list[Any]]] = defaultdict(list)
    inside = [span for span in spans if span["ts"] < end and span["ts"] + span["dur"] > start]
    for span in sorted(inside, key=lambda span: span["ts"])[:_MAX_SPANS]:
        lanes[span["pid"], span["tid"]].append(
            [
                round(span["ts"] - start, 1),
                round(span["dur"], 1),
                span["name"],
                span.get("args", {}),
            ]
        )
    return {
        "firstStep": first_step,
        "length": round(end - start, 1),
        "ranks": [
            {
                "rank": rank,
                "lanes": [
                    {"name": names.get((pid, tid), str(tid)), "spans": found}
                    for (pid, tid), found in sorted(lanes.items())
                    if pid == rank
                ],
            }
            for rank in ranks
        ],
    }


def _window(spans: list[Record]) -> tuple[int | None, float, float]:
    """The first step shown and where the window starts and ends, in microseconds."""
    lowest = min(span["pid"] for span in spans)
    own = [span for span in spans if span["pid"] == lowest]
    starts: dict[int, float] = {}
    for span in own:
        step = span.get("args", {}).get("step")
        if isinstance(step, int) and span["name"] not in _UNUSUAL:
            starts[step] = min(span["ts"], starts.get(step, span["ts"]))
    windows = [
        (step, starts[step], starts[step + _STEPS_SHOWN])
        for step in sorted(starts)
        if step + _STEPS_SHOWN in starts
    ]
    if not windows:
        whole_start = min(span["ts"] for span in spans)
        whole_end = max(span["ts"] + span["dur"] for span in spans)
        return min(starts, default=None), whole_start, max(whole_end, whole_start + 1)
    unusual = [span for span in own if span["name"] in _UNUSUAL]
    middle = len(windows) // 2
    by_distance = sorted(range(len(windows)), key=lambda i: abs(i - middle))
    for i in by_distance:
        _, start, end = windows[i]
        if not any(span["ts"] < end and span["ts"] + span["dur"] > start for span in unusual):
            return windows[i]
    return windows[middle]
