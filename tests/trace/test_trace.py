"""The recorder: bounded, thread-safe, saved whole."""

import json
import math
import threading
import time
from pathlib import Path

import pytest

from gossipgrad.trace import Trace


def saved_lines(trace: Trace, path: Path) -> list[dict]:
    return [json.loads(line) for line in trace.save(path).read_text().splitlines()]


def test_saves_a_header_and_a_line_a_span(tmp_path):
    trace = Trace(3)
    trace.span("mix", 1.0, 1.5, round=7)
    trace.span("forward", 0.5, 0.75)
    header, *spans = saved_lines(trace, tmp_path / "trace.jsonl")
    assert header["rank"] == 3
    assert header["spans"] == 2
    assert header["dropped"] == 0
    assert header["earliest_seconds"] == 0.5
    assert spans == [
        {"name": "mix", "start": 1.0, "end": 1.5, "attributes": {"round": 7}},
        {"name": "forward", "start": 0.5, "end": 0.75},
    ]


def test_the_clocks_of_the_header_are_of_one_moment(tmp_path):
    (header,) = saved_lines(Trace(0), tmp_path / "trace.jsonl")
    tightest_seconds = math.inf
    while tightest_seconds > 0.001:  # else something stood between the two
        before = time.perf_counter()
        offset_now = time.time() - before
        tightest_seconds = time.perf_counter() - before
    offset_then = header["wall_clock_ns"] / 1e9 - header["perf_counter_seconds"]
    assert offset_then == pytest.approx(offset_now, abs=0.05)


def test_drops_the_oldest_and_says_how_many(tmp_path):
    trace = Trace(0, max_spans=3)
    for i in range(5):
        trace.span(f"span {i}", float(i), float(i + 1))
    assert trace.num_spans == 3
    assert trace.dropped == 2
    header, *spans = saved_lines(trace, tmp_path / "trace.jsonl")
    assert header["dropped"] == 2
    assert [span["name"] for span in spans] == ["span 2", "span 3", "span 4"]


def test_counts_every_span_of_many_threads_even_while_saving(tmp_path):
    trace = Trace(0, max_spans=100)

    def record() -> None:
        for i in range(500):
            trace.span("forward", float(i), float(i))

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(5):
        trace.save(tmp_path / f"{i}.jsonl")
    for thread in threads:
        thread.join()
    assert trace.num_spans + trace.dropped == 2000


def test_measure_records_its_body():
    trace = Trace(0)
    before = time.perf_counter()
    with trace.measure("forward", step=3):
        pass
    after = time.perf_counter()
    (name, start, end, attributes) = trace._spans[0]
    assert (name, attributes) == ("forward", {"step": 3})
    assert before <= start <= end <= after


def test_measure_records_a_body_that_raises():
    trace = Trace(0)
    with pytest.raises(KeyError), trace.measure("data"):
        raise KeyError("gone")
    assert trace._spans[0][3] == {"error": "KeyError"}


def test_odd_attributes_do_not_cost_the_trace(tmp_path):
    trace = Trace(0)
    trace.span("mix", 0.0, 1.0, distance=math.nan, path=Path("a"), many=[1, math.inf])
    _, span = saved_lines(trace, tmp_path / "trace.jsonl")
    assert span["attributes"] == {"distance": None, "path": "a", "many": [1, None]}


def test_save_leaves_no_partial_file(tmp_path):
    Trace(0).save(tmp_path / "trace.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_recording_is_cheap():
    trace = Trace(0)
    start = time.thread_time()
    for _ in range(20_000):
        trace.span("mix", 0.0, 1.0, round=1)
    # The type checks of the test run are included; without them it is a tenth of this.
    assert time.thread_time() - start < 2.0


@pytest.mark.parametrize("end", [0.5, math.nan])
def test_refuses_a_span_that_ends_before_it_starts(end):
    with pytest.raises(ValueError, match=r"span 'mix' ends at .* before it starts at 1.0"):
        Trace(0).span("mix", 1.0, end)


def test_refuses_settings_that_make_no_sense():
    with pytest.raises(ValueError, match="rank must be 0 or more, got -1"):
        Trace(-1)
    with pytest.raises(ValueError, match="max_spans must be 1 or more, got 0; to record nothing"):
        Trace(0, max_spans=0)
