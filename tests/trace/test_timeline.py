"""The steps of a trace: which are there, which are shown first."""

import pytest

from gossipgrad.trace._spans import Span, Spans, parse_events
from gossipgrad.trace._timeline import timeline


def spans_of(*found: tuple, rank: int = 0) -> list[Span]:
    """Spans of one track from (name, start, end, attributes), in microseconds."""
    return [Span(rank, 1, name, float(a), float(b), args) for name, a, b, args in found]


def steps(count: int, *, first: int = 1, rank: int = 0) -> list[Span]:
    """A forward and a backward span for each step of 100 us."""
    found = []
    for step in range(first, first + count):
        start = 100 * (step - first)
        found += [("forward", start, start + 40, {"step": step})]
        found += [("backward", start + 40, start + 90, {"step": step})]
    return spans_of(*found, rank=rank)


def test_holds_all_steps_and_shows_three_ordinary_ones_first():
    trace = steps(11, first=6)
    trace += spans_of(("evaluate", 590, 599, {"step": 11}))
    found = timeline(Spans(spans=sorted(trace, key=lambda span: span.start_us)))
    assert [step.number for step in found.steps] == list(range(6, 17))
    assert (found.start_us, found.end_us) == (0, 1090)
    assert found.shown_us == (200, 500), "without the evaluation, as near the middle as can be"
    assert found.description == (
        "Steps 6 to 16 of rank 0 and what went on meanwhile, first 8 to 10."
    )
    head, rows = found.table()
    assert (head, rows) == (["Rank", "forward", "backward"], [["rank 0", "0.12", "0.15"]])


def test_takes_as_many_steps_around_the_first_shown_as_fit():
    found = timeline(Spans(spans=steps(100)), max_spans=20)
    numbers = [step.number for step in found.steps]
    assert len(numbers) == 10
    assert numbers == list(range(numbers[0], numbers[0] + 10))
    first = next(step.number for step in found.steps if step.start_us == found.shown_us[0])
    assert first == numbers[0] == 49
    assert sum(len(lane.spans) for lane in found.lanes) <= 20


def test_a_trace_without_steps_is_shown_whole():
    found = timeline(Spans(spans=spans_of(("mine", 10, 20, {}), ("mine", 30, 45, {}))))
    assert (found.shown_us, found.steps) == ((10, 45), [])
    assert found.description == "The whole trace."
    assert timeline(Spans()) is None


def test_the_payload_counts_from_the_start_of_the_window():
    trace = Spans(spans=spans_of(("a", 1000, 1010, {"x": 1})), track_names={(0, 1): "compute"})
    payload = timeline(trace).payload()
    assert payload["names"] == ["a"]
    assert payload["ranks"] == [
        {"rank": 0, "lanes": [{"name": "compute", "spans": [[0.0, 10.0, 0, {"x": 1}]]}]}
    ]
    assert (payload["length"], payload["shown"]) == (10.0, [0.0, 10.0])


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "a", "ts": "soon", "dur": 1, "pid": 0, "tid": 0},
        {"ph": "X", "name": "a", "ts": 1, "dur": None, "pid": 0, "tid": 0},
        {"ph": "X", "name": ["a"], "ts": 1, "dur": 1, "pid": 0, "tid": 0},
        {"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": "0", "tid": 0},
        {"ph": "X"},
        {},
        "X",
        None,
    ],
)
def test_events_that_are_none_are_counted_and_left_out(event):
    whole = {"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": [1]}
    found = parse_events([event, whole])
    assert found.skipped == 1
    assert found.spans == [Span(0, 0, "a", 1.0, 2.0, {})]
    assert parse_events("no list").spans == []
