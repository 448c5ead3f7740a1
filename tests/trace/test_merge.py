"""The Chrome trace of all ranks: aligned, named, and nested as Perfetto wants it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.trace import Trace, merge_traces

Event = dict[str, Any]


def save(
    path: Path,
    rank: int,
    spans: list[tuple],
    *,
    wall_clock_ns: int = 1_700_000_000_000_000_000,
    perf_counter_seconds: float = 0.0,
) -> Path:
    """A rank's trace whose clocks stood as told; spans are (name, start, end, attributes)."""
    trace = Trace(rank)
    trace._wall_clock_ns = wall_clock_ns
    trace._perf_counter_seconds = perf_counter_seconds
    for name, start, end, attributes in spans:
        trace.span(name, float(start), float(end), **attributes)
    return trace.save(path)


def merged(tmp_path: Path, *paths: Path) -> dict[str, Any]:
    return json.loads(merge_traces(paths, tmp_path / "trace.json").read_text())


def spans_of(trace: dict[str, Any], name: str = "") -> list[Event]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and name in ("", e["name"])]


def track_name(trace: dict[str, Any], event: Event) -> str:
    (name,) = (
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
    )
    return name


def check(trace: dict[str, Any]) -> None:
    """What Perfetto and chrome://tracing take for granted of a trace."""
    assert isinstance(trace["metadata"], dict)
    named_threads, named_processes = {}, set()
    tracks = defaultdict(list)
    flows = defaultdict(list)
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
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-3, "a span reaches out of the one it is in"
            ends.append(end)
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in tracks[end["tid"]])


def exchange(
    round: int, bucket: int, send_to: int | None, recv_from: int | None, outcome: str = "delivered"
) -> dict[str, Any]:
    return {
        "round": round,
        "bucket": bucket,
        "send_to": send_to,
        "recv_from": recv_from,
        "outcome": outcome,
    }


def test_aligns_two_ranks_by_their_wall_clocks(tmp_path):
    # Rank 1's span clock started an hour before rank 0's; by the wall, it computes 2 ms later.
    now = 1_700_000_000_000_000_000
    first = save(
        tmp_path / "0", 0, [("forward", 10.0, 10.001, {"step": 4})], wall_clock_ns=now,
        perf_counter_seconds=10.0,
    )  # fmt: skip
    second = save(
        tmp_path / "1", 1, [("forward", 3610.001, 3610.004, {})], wall_clock_ns=now + 1_000_000,
        perf_counter_seconds=3610.0,
    )  # fmt: skip
    trace = merged(tmp_path, second, first)
    check(trace)
    a, b = spans_of(trace)
    assert (a["pid"], a["ts"], a["dur"]) == (0, 0.0, pytest.approx(1000))
    assert (b["pid"], b["ts"], b["dur"]) == (1, pytest.approx(2000), pytest.approx(3000))
    assert a["args"] == {"step": 4}
    assert trace["metadata"]["origin_unix_ns"] == now
    names = {e["pid"]: e["args"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: {"name": "rank 0"}, 1: {"name": "rank 1"}}


def test_each_kind_has_its_track(tmp_path):
    path = save(
        tmp_path / "0",
        0,
        [
            ("forward", 0, 1, {}),
            ("evaluate", 1, 2, {}),
            ("wait", 2, 3, {}),
            ("mix", 3, 4, {}),
            *(("exchange", 0, 3, exchange(1, bucket, 1, 1)) for bucket in (10, 9)),
            ("of my own", 4, 5, {}),
        ],
    )
    trace = merged(tmp_path, path)
    check(trace)
    tracks = defaultdict(list)
    for event in spans_of(trace):
        tracks[track_name(trace, event)].append(event["name"])
    assert dict(tracks) == {
        "compute": ["forward", "evaluate", "of my own"],
        "communication": ["wait", "mix"],
        "exchange, bucket 9": ["exchange"],
        "exchange, bucket 10": ["exchange"],
    }


def test_exchanges_of_a_bucket_that_overlap_are_not_nested(tmp_path):
    spans = [
        ("exchange", 0, 10, exchange(1, 0, 1, 1)),
        ("exchange", 2, 5, exchange(2, 0, 1, 1)),
        ("exchange", 4, 12, exchange(3, 0, 1, 1)),
    ]
    trace = merged(tmp_path, save(tmp_path / "0", 0, spans))
    check(trace)
    assert len({event["tid"] for event in spans_of(trace)}) == 3


def test_work_of_two_threads_that_overlaps_gets_a_lane_of_its_own(tmp_path):
    spans = [("backward", 0, 4, {}), ("optimizer", 1, 2, {}), ("data", 3, 6, {})]
    trace = merged(tmp_path, save(tmp_path / "0", 0, spans))
    check(trace)
    lanes = {event["name"]: track_name(trace, event) for event in spans_of(trace)}
    assert lanes == {"backward": "compute", "optimizer": "compute", "data": "compute (2)"}


def test_arrows_join_what_was_sent_with_what_arrived(tmp_path):
    # A ring of three in one round; rank 2 got nothing in time.
    outcomes = ["delivered", "delivered", "late"]
    paths = [
        save(
            tmp_path / str(rank),
            rank,
            [("exchange", rank, rank + 9, exchange(5, 0, (rank + 1) % 3, (rank - 1) % 3, outcome))],
        )
        for rank, outcome in enumerate(outcomes)
    ]
    trace = merged(tmp_path, *paths)
    check(trace)
    starts = {e["id"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "f"}
    assert {(starts[i], ends[i]) for i in starts} == {(0, 1), (2, 0)}


def test_no_arrow_leads_back_in_time(tmp_path):
    paths = [
        save(tmp_path / "0", 0, [("exchange", 100, 101, exchange(5, 0, 1, None))]),
        save(tmp_path / "1", 1, [("exchange", 0, 1, exchange(5, 0, None, 0))]),
    ]
    trace = merged(tmp_path, *paths)
    check(trace)
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


def test_a_rank_that_sat_out_has_no_arrows(tmp_path):
    trace = merged(
        tmp_path, save(tmp_path / "0", 0, [("exchange", 0, 1, exchange(1, 0, None, None))])
    )
    check(trace)
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


def test_tells_what_was_dropped_and_what_could_not_be_read(tmp_path):
    trace = Trace(2, max_spans=1)
    trace.span("mix", 0.0, 1.0)
    trace.span("mix", 1.0, 2.0)
    path = trace.save(tmp_path / "2")
    with path.open("a") as file:
        file.write('{"name": "mix", "st')
    metadata = merged(tmp_path, path)["metadata"]
    assert metadata["ranks"] == [2]
    assert metadata["dropped_spans"] == {"2": 1}
    assert metadata["skipped_lines"] == {"2": 1}


def test_ranks_without_spans_are_named_all_the_same(tmp_path):
    trace = merged(tmp_path, Trace(0).save(tmp_path / "0"))
    check(trace)
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == [
        "rank 0"
    ]


def test_refuses_what_is_no_set_of_traces(tmp_path):
    one = Trace(0).save(tmp_path / "one")
    again = Trace(0).save(tmp_path / "again")
    other = tmp_path / "other"
    other.write_text('{"event": "step"}\n')
    with pytest.raises(ValueError, match="paths is empty"):
        merge_traces([], tmp_path / "out")
    with pytest.raises(ValueError, match=r"one and .*again are both of rank 0"):
        merge_traces([one, again], tmp_path / "out")
    with pytest.raises(ValueError, match="other does not begin as a trace of version 1"):
        merge_traces([other], tmp_path / "out")
    assert not (tmp_path / "out").exists()
