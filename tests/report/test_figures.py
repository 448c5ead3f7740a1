"""Bars, who met whom, and the timeline: by trace and metrics, whatever is missing."""

import json
import re

import numpy as np
import pytest

from gossipgrad.topology import by_name
from support.html_page import Page


def bars_of(page: Page) -> dict[str, dict]:
    return {each["id"]: each for each in page.data()["bars"]}


def parts_of(bars: dict) -> dict[str, dict]:
    return {bar["label"]: bar["parts"] for bar in bars["bars"]}


@pytest.fixture
def traced(tmp_path):
    """Writes a run of four ranks that has left a trace of (rank, name, start, end, attributes)."""

    def write(*spans: tuple):
        directory = tmp_path / "traced"
        directory.mkdir()
        (directory / "config.json").write_text('{"nproc": 4}')
        keys = ("pid", "name", "ts", "dur", "args")
        events = [
            dict(zip(keys, (rank, name, start, end - start, args), strict=True))
            | {"ph": "X", "tid": 1}
            for rank, name, start, end, args in spans
        ]
        (directory / "trace.json").write_text(json.dumps({"traceEvents": events}))
        return directory

    return write


def test_bars_of_one_run_have_a_row_a_rank(write_run, report):
    found = bars_of(report(write_run()))
    assert list(found) == ["traffic", "rates", "outcomes", "lateness"]
    assert [(bar["label"], bar["parts"], bar["note"]) for bar in found["traffic"]["bars"]] == [
        ("sent", {"exchanges": 1000.0}, "1 kB, 67%"),
        ("ring all-reduce", {"reference": 1500.0}, "1.5 kB"),
    ]
    outcomes = parts_of(found["outcomes"])
    assert outcomes["all workers"]["delivered"] == 118, "the summary has the whole run"
    assert outcomes["rank 3"] == {"delivered": 28, "late": 2}
    assert [bar["note"] for bar in found["lateness"]["bars"]] == ["100.0% of 30"] * 4


def test_outcomes_come_from_the_trace_where_nothing_else_has_them(traced, report):
    page = report(
        traced(
            (0, "exchange", 0.0, 1.0, {"outcome": "delivered"}),
            (0, "exchange", 1.0, 2.0, {"outcome": "void"}),
            (3, "exchange", 0.0, 1.0, {"outcome": "delivered"}),
            (2, "exchange", 0.0, 1.0, {"bucket": 0}),
        )
    )
    assert parts_of(bars_of(page)["outcomes"]) == {
        "all workers": {"delivered": 2, "void": 1},
        "rank 0": {"delivered": 1, "void": 1},
        "rank 1": {},
        "rank 2": {},
        "rank 3": {"delivered": 1},
    }


def test_staleness_counts_the_rounds_begun_since(traced, report):
    page = report(
        traced(
            (0, "snapshot", 0.0, 1.0, {"round": 0}),
            (0, "mix", 5.0, 6.0, {"round": 0, "bucket": 0}),
            (0, "snapshot", 10.0, 11.0, {"round": 1}),
            (0, "snapshot", 20.0, 21.0, {"round": 2}),
            (0, "mix", 22.0, 23.0, {"round": 2}),
            (0, "mix", 23.0, 24.0, {"round": 1}),
            (0, "snapshot", 90.0, 91.0, {"round": 40}),
            (0, "mix", 95.0, 96.0, {"round": 3}),
            (0, "mix", 96.0, 97.0, {}),
            (1, "mix", 96.0, 97.0, {"round": 1}),
        )
    )
    lateness = parts_of(bars_of(page)["lateness"])
    assert lateness["rank 0"] == {"0": 2, "1": 1, "4 or more": 1}
    assert lateness["rank 1"] == {}


def test_a_rank_without_metrics_has_an_empty_row(write_run, report):
    directory = write_run()
    (directory / "metrics-rank2.jsonl").unlink()
    page = report(directory)
    assert parts_of(bars_of(page)["rates"])["rank 2"] == {}
    assert ["rank 2", "n/a"] in page.rows


@pytest.mark.parametrize("is_finished", [True, False])
def test_traffic_has_the_ring_shuffle_and_says_what_is_computed(
    write_run, report, change, is_finished
):
    directory = write_run(world_size=1)
    summary, metrics = directory / "summary.json", directory / "metrics-rank0.jsonl"
    change(summary, shuffle_bytes_sent_per_step=250, bytes_sent_are="computed: ring all-reduce")
    text = metrics.read_text().replace('"outcomes"', '"shuffle_bytes_sent": 60, "outcomes"')
    metrics.write_text(text)
    if not is_finished:
        summary.unlink()
    label, parts = next(iter(parts_of(bars_of(report(directory))["traffic"]).items()))
    if is_finished:
        assert (label, parts) == ("sent (computed)", {"exchanges": 1000.0, "shuffle": 250.0})
    else:
        assert (label, parts) == ("sent", {"exchanges": 1000.0, "shuffle": 2.0})


@pytest.mark.parametrize("recorded", [None, [], {"delivered": "many"}, "x"])
def test_outcomes_that_are_none_are_no_bars(write_run, report, change, recorded):
    directory = write_run(world_size=2)
    change(directory / "summary.json", outcomes=recorded)
    outcomes = parts_of(bars_of(report(directory))["outcomes"])
    assert not outcomes["all workers"]
    assert outcomes["rank 0"]


def test_of_many_workers_the_worst_are_drawn_and_all_are_in_the_table(write_run, report):
    directory = write_run(world_size=20)
    for rank, slower in ((3, 32), (17, 3)):
        path = directory / f"metrics-rank{rank}.jsonl"
        text = re.sub(
            r'(?<="train_seconds": )[\d.]+',
            lambda found, times=slower: str(times * float(found[0])),
            path.read_text(),
        )
        worse = text.replace('{"delivered": 28, "late": 2}', '{"delivered": 8, "late": 22}')
        path.write_text(worse)
    page = report(directory)
    for name, rows in (("rates", 12), ("outcomes", 13)):
        drawn = parts_of(bars_of(page)[name])
        assert len(drawn) == rows
        assert {"rank 3", "rank 17"} <= set(drawn)
    assert any("The 12 slowest of 20 are drawn" in text for text in page.contents["p"])
    two_columns = [row for row in page.rows if row[0].startswith("rank") and len(row) == 2]
    assert len(two_columns) == 2 * 20, "rates, and rounds late"


def mixing_of(page: Page) -> dict:
    (found,) = page.data()["mixings"]
    return found


def test_a_whole_trace_is_the_schedule(write_run, report):
    page = report(write_run(world_size=8))
    found = mixing_of(page)
    assert (found["firstRound"], len(found["observed"]), found["period"]) == (1, 30, 3)
    assert found["observed"] == found["expected"]
    schedule = by_name("hypercube", 8, seed=0)
    for row, round in zip(found["observed"], range(1, 31), strict=True):
        np.testing.assert_array_equal(row, schedule.round_peers(round).recv_from)
    assert "Delivered by the partner of the schedule: 240 of 240." in found["about"]
    (start,) = (n for n, row in enumerate(page.rows) if row[:2] == ["Rank", "from 0"])
    assert [sum(map(int, row[1:])) for row in page.rows[start + 1 : start + 9]] == [30] * 8


def test_what_was_not_delivered_or_is_odd_was_not_received(write_run, report, edit_trace):
    directory = write_run()

    def spoil(event):
        args = event.get("args", {})
        if event["name"] == "exchange" and event["pid"] == 2:
            args |= {3: {"outcome": "void"}, 5: {"recv_from": 99}, 6: {"round": "six"}}.get(
                args["round"], {}
            )
        return event

    edit_trace(directory, spoil)
    found = mixing_of(report(directory))
    assert [row[2] for row in found["observed"][2:6]] == [-1, found["expected"][3][2], -1, -1]
    assert "117 of 120" in found["about"]


def test_a_rank_without_a_trace_is_named(write_run, report, edit_trace):
    directory = write_run()
    edit_trace(directory, lambda event: None if event["pid"] == 1 else event)
    page = report(directory)
    assert mixing_of(page)["silent"] == [1]
    assert {row[1] for row in mixing_of(page)["observed"]} == {-1}
    assert "rank 1" in mixing_of(page)["about"]
    assert ["rank 1", *["no trace"] * 4] in page.rows


@pytest.mark.parametrize("topology", ["unheard of", None, 3, "hypercube"])
def test_without_a_schedule_there_is_nothing_beside_it(write_run, report, topology):
    page = report(write_run(world_size=3, strategy_is={"topology": topology}))
    assert mixing_of(page)["expected"] is None


@pytest.mark.parametrize("is_traced", [True, False])
def test_ranks_that_joined_are_drawn_without_a_schedule(
    write_run, report, change, edit_trace, is_traced
):
    """In the trace or after it, when the schedule is that of the ranks at the start."""
    directory = write_run()
    joined = {"rank": 4, "from_rank": 0, "steps": 3, "end": "left"}
    change(directory / "summary.json", joined=[joined])

    def join(event):
        if is_traced and event["name"] == "exchange" and event["args"]["round"] >= 3:
            event["args"] |= {"generation": 1}
            event["args"] |= {"recv_from": 4} if event["pid"] == 2 else {}
        return event

    edit_trace(directory, join)
    page = report(directory)
    found = mixing_of(page)
    assert found["worldSize"] == 5
    if is_traced:
        assert found["expected"] is None
        assert found["observed"][2][2] == 4, "it took the part of the rank that joined"
    else:
        assert found["expected"] == found["observed"]
        assert {row[4] for row in found["expected"]} == {-1}
    assert any(text.startswith("Rank 4 joined from rank 0") for text in page.contents["li"])


def steps(count, first=1):
    """A forward and a backward span for each step of 100 us."""
    for step in range(first, first + count):
        start = 100.0 * (step - first)
        yield 0, "forward", start, start + 40, {"step": step}
        yield 0, "backward", start + 40, start + 90, {"step": step}


def test_the_timeline_shows_three_ordinary_steps_first(traced, report):
    page = report(traced(*steps(11, first=6), (0, "evaluate", 590.0, 599.0, {"step": 11})))
    (found,) = page.data()["timelines"]
    assert [step for step, *_ in found["steps"]] == list(range(6, 17))
    assert (found["length"], found["shown"]) == (1090, [200, 500]), "none with an evaluation"
    assert found["about"] == "Steps 6 to 16 of rank 0 and what went on meanwhile, first 8 to 10."
    assert ["rank 0", "0.12", "0.15"] in page.rows


def test_a_long_trace_is_cut_around_the_steps_first_shown(traced, report):
    (found,) = report(traced(*steps(8000))).data()["timelines"]
    numbers = [step for step, *_ in found["steps"]]
    assert len(numbers) == 6000
    assert numbers == list(range(numbers[0], numbers[0] + 6000))
    (lane,) = found["ranks"][0]["lanes"]
    assert len(lane["spans"]) == 12_000


def test_a_trace_without_steps_is_shown_whole(traced, report):
    page = report(traced((0, "mine", 1000.0, 1010.0, {"x": 1}), (0, "mine", 1030.0, 1045.0, {})))
    (found,) = page.data()["timelines"]
    assert (found["shown"], found["steps"], found["about"]) == ([0, 45], [], "The whole trace.")
    assert (found["length"], found["names"]) == (45, ["mine"])
    (lane,) = found["ranks"][0]["lanes"]
    assert lane["spans"] == [[0, 10, 0, {"x": 1}], [30, 15, 0, {}]]
    assert page.data()["mixings"] == []


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "a", "ts": "soon", "dur": 1, "pid": 0, "tid": 0},
        {"ph": "X", "name": "a", "ts": 1, "dur": None, "pid": 0, "tid": 0},
        {"ph": "X", "name": ["a"], "ts": 1, "dur": 1, "pid": 0, "tid": 0},
        {"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": "0", "tid": 0},
        {},
        "X",
        None,
    ],
)
def test_events_that_cannot_be_read_are_counted_and_left_out(traced, report, event):
    directory = traced((0, "a", 1.0, 2.0, [1]))
    path = directory / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    path.write_text(json.dumps({"traceEvents": [event, *events]}))
    page = report(directory)
    assert "1 event of trace.json could not be read." in page.contents["li"]
    assert page.data()["timelines"][0]["names"] == ["a"]
