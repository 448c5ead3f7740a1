"""Spans of one rank, and the Chrome trace of all: aligned, named, nested as Perfetto wants it."""

import json
import math
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipgrad.report import Trace, merge_traces


def saved_lines(trace: Trace, path: Path) -> list[dict]:
    return [json.loads(line) for line in trace.save(path).read_text().splitlines()]


def test_drops_the_oldest_and_says_how_many(tmp_path):
    trace = Trace(2, max_spans=3)
    for i in range(5):
        trace.span(f"span {i}", float(i), float(i + 1))
    assert (trace.num_spans, trace.dropped) == (3, 2)
    path = tmp_path / "trace.jsonl"
    header, *spans = saved_lines(trace, path)
    assert header["dropped"] == 2
    assert [span["name"] for span in spans] == ["span 2", "span 3", "span 4"]
    with path.open("a") as file:
        file.write('{"name": "mix", "st')
    metadata = merged(tmp_path, path)["metadata"]
    assert metadata["ranks"] == [2]
    assert (metadata["dropped_spans"], metadata["skipped_lines"]) == ({"2": 2}, {"2": 1})


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


def test_measure_records_its_body_and_an_error_in_it(tmp_path):
    trace = Trace(0)
    before = time.perf_counter()
    with trace.measure("forward", step=3):
        pass
    with pytest.raises(KeyError), trace.measure("data"):
        raise KeyError("gone")
    after = time.perf_counter()
    _, first, second = saved_lines(trace, tmp_path / "trace.jsonl")
    assert before <= first["start"] <= first["end"] <= second["start"] <= after
    assert (first["name"], first["attributes"]) == ("forward", {"step": 3})
    assert (second["name"], second["attributes"]) == ("data", {"error": "KeyError"})


def test_odd_attributes_do_not_cost_the_trace(tmp_path):
    trace = Trace(0)
    trace.span("mix", 0.0, 1.0, distance=math.nan, path=Path("a"), many=[1, math.inf])
    _, span = saved_lines(trace, tmp_path / "trace.jsonl")
    assert span["attributes"] == {"distance": None, "path": "a", "many": [1, None]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Trace(-1),
        lambda: Trace(0, max_spans=0),
        lambda: Trace(0).span("mix", 1.0, 0.5),
        lambda: Trace(0).span("mix", 1.0, math.nan),
    ],
)
def test_settings_and_spans_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"rank|max_spans|mix"):
        make()


Event = dict[str, Any]
NOW_NS = 1_700_000_000_000_000_000


def save(path: Path, rank: int, spans: list[tuple], *, wall_ns: int = 0, clock: float = 0.0):
    """A rank's trace with given clocks; spans are (name, start, end, attributes)."""
    trace = Trace(rank)
    for name, start, end, attributes in spans:
        trace.span(name, float(start), float(end), **attributes)
    header, *lines = trace.save(path).read_text().splitlines()
    clocks = {"wall_clock_ns": NOW_NS + wall_ns, "perf_counter_seconds": clock}
    path.write_text("\n".join([json.dumps(json.loads(header) | clocks), *lines]) + "\n")
    return path


def merged(tmp_path: Path, *paths: Path) -> dict[str, Any]:
    """The trace; checks what Perfetto and chrome://tracing take for granted."""
    trace = json.loads(merge_traces(paths, tmp_path / "trace.json").read_text())
    named_threads, named_processes = {}, set()
    tracks, flows = defaultdict(list), defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ts"] >= 0
        match event["ph"]:
            case "M" if event["name"] == "thread_name":
                assert event["tid"] not in named_threads, "threads are known by number alone"
                named_threads[event["tid"]] = event["pid"]
            case "M" if event["name"] == "process_name":
                named_processes.add(event["pid"])
            case "M":
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert isinstance(event["args"]["sort_index"], int)
            case "X":
                assert event["dur"] >= 0
                tracks[event["tid"]].append(event)
            case "s" | "f":
                flows[event["id"]].append(event)
            case other:
                raise AssertionError(f"unexpected phase {other}")
    for tid, events in tracks.items():
        assert named_threads[tid] == events[0]["pid"]
        assert events[0]["pid"] in named_processes
        ends: list[float] = []
        for event in events:  # in file order: a parent comes before its children
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-3, "a span reaches out of the one it is in"
            assert not ends or event["name"] != "exchange", "exchanges in flight are never nested"
            ends.append(end)
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in tracks[end["tid"]])
    return trace


def spans_of(trace: dict[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def tracks_of(trace: dict[str, Any]) -> dict[str, list[str]]:
    """The names of spans by the name of their track."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    tracks = defaultdict(list)
    for event in spans_of(trace):
        tracks[names[event["pid"], event["tid"]]].append(event["name"])
    return dict(tracks)


def exchange(round, bucket, send_to, recv_from, outcome="delivered"):
    attributes = {"round": round, "bucket": bucket, "send_to": send_to, "recv_from": recv_from}
    return attributes | {"outcome": outcome}


def test_aligns_two_ranks_by_their_wall_clocks(tmp_path):
    # Rank 1's span clock started an hour before rank 0's; by the wall, it computes 2 ms later.
    first = save(tmp_path / "0", 0, [("forward", 10.0, 10.001, {"step": 4})], clock=10.0)
    late = [("forward", 3610.001, 3610.004, {})]
    second = save(tmp_path / "1", 1, late, wall_ns=1_000_000, clock=3610.0)
    trace = merged(tmp_path, second, first)
    a, b = spans_of(trace)
    assert (a["pid"], a["ts"], a["dur"]) == (0, 0.0, pytest.approx(1000))
    assert (b["pid"], b["ts"], b["dur"]) == (1, pytest.approx(2000), pytest.approx(3000))
    assert a["args"] == {"step": 4}
    assert trace["metadata"]["origin_unix_ns"] == NOW_NS
    names = {e["pid"]: e["args"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: {"name": "rank 0"}, 1: {"name": "rank 1"}}


def test_each_kind_has_its_track_and_what_overlaps_a_lane(tmp_path):
    spans = [
        *(("forward", 0, 1, {}), ("evaluate", 1, 2, {}), ("wait", 2, 3, {}), ("mix", 3, 4, {})),
        *(("exchange", 0, 3, exchange(1, bucket, 1, 1)) for bucket in (10, 9)),
        *(("of my own", 4, 5, {}), ("backward", 4.5, 6, {}), ("root", 0, 1, {})),
    ]
    assert tracks_of(merged(tmp_path, save(tmp_path / "0", 0, spans))) == {
        "compute": ["forward", "evaluate", "of my own"],
        "compute (2)": ["backward"],
        "communication": ["wait", "mix"],
        "exchange, bucket 9": ["exchange"],
        "exchange, bucket 10": ["exchange"],
        "roots": ["root"],
    }


@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=25),
    name=st.sampled_from(["forward", "exchange"]),
)
def test_lanes_are_readable_and_no_more_than_needed(tmp_path_factory, spans, name):
    """`merged` checks that they are."""
    folder = tmp_path_factory.mktemp("lanes")
    found = [(name, start, start + length, {}) for start, length in spans]
    tracks = tracks_of(merged(folder, save(folder / "0", 0, found)))
    at_once = max((sum(s <= at <= s + n for s, n in spans) for at, _ in spans), default=0)
    assert len(tracks) <= at_once


@pytest.mark.parametrize(
    ("start", "outcome", "arrows"),
    [(0, "delivered", {(0, 1)}), (0, "late", set()), (99, "", set())],
)
def test_arrows_join_what_was_sent_with_what_arrived(tmp_path, start, outcome, arrows):
    """But none leads back in time, as between clocks that differ."""
    ends = [exchange(5, 0, 1, None), exchange(5, 0, None, 0, outcome or "delivered")]
    times = [(start, start + 9), (1, 10)]
    trace = merged(
        tmp_path,
        *(
            save(tmp_path / str(rank), rank, [("exchange", *times[rank], ends[rank])])
            for rank in range(2)
        ),
    )
    pids = [{e["id"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == ph} for ph in "sf"]
    assert {(pids[0][i], pids[1][i]) for i in pids[0]} == arrows


def test_refuses_files_that_are_no_traces_of_one_run(tmp_path):
    one, again = (Trace(0).save(tmp_path / name) for name in ("one", "again"))
    other = tmp_path / "other"
    other.write_text('{"event": "step"}\n')
    for paths, named in (([], "paths"), ([one, again], "again"), ([other], "other")):
        with pytest.raises(ValueError, match=named):
            merge_traces(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()
