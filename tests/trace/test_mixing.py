"""Who met whom: as the trace tells, beside the schedule, whatever is missing."""

import json

import numpy as np
import pytest

from gossipgrad.topology import by_name
from gossipgrad.trace._mixing import mixing
from gossipgrad.trace._runs import read_run


def edit_trace(directory, change):
    path = directory / "trace.json"
    trace = json.loads(path.read_text())
    trace["traceEvents"] = [e for e in map(change, trace["traceEvents"]) if e is not None]
    path.write_text(json.dumps(trace))


def test_a_whole_trace_is_what_the_schedule_says(write_run):
    found = mixing(read_run(write_run(world_size=8)))
    assert (found.first_round, len(found.observed), found.period) == (1, 30, 3)
    assert found.observed == found.expected
    schedule = by_name("hypercube", 8, seed=0)
    for row, round in zip(found.observed, range(1, 31), strict=True):
        np.testing.assert_array_equal(row, schedule.round_peers(round).recv_from)
    assert found.description == (
        "30 rounds of the trace. Delivered by the partner of the schedule: 240 of 240."
    )
    head, rows = found.table()
    assert head[:3] == ["Rank", "from 0", "from 1"]
    assert rows[0][1] == "0"
    assert [sum(map(int, row[1:])) for row in rows] == [30] * 8


def test_what_was_not_delivered_was_not_taken(write_run):
    directory = write_run()

    def lose(event):
        if event["name"] == "exchange" and event["args"]["round"] == 3 and event["pid"] == 2:
            event["args"]["outcome"] = "void"
        return event

    edit_trace(directory, lose)
    found = mixing(read_run(directory))
    assert found.observed[2][2] == -1
    assert "119 of 120" in found.description


def test_a_rank_without_a_trace_is_named(write_run):
    directory = write_run()
    edit_trace(directory, lambda event: None if event["pid"] == 1 else event)
    found = mixing(read_run(directory))
    assert found.silent_ranks == [1]
    assert {row[1] for row in found.observed} == {-1}
    assert "No exchange of rank 1 is in it: drawn as if it had taken nothing." in found.description
    assert found.table()[1][1][1] == "no trace"


@pytest.mark.parametrize("topology", ["unheard of", None, 3, "hypercube"])
def test_without_a_schedule_there_is_nothing_beside_it(write_run, topology):
    directory = write_run(world_size=3, strategy_is={"topology": topology})
    found = mixing(read_run(directory))
    assert found.expected is None
    assert "The schedule of the run is not known" in found.description


def test_without_exchanges_there_is_no_image(write_run):
    directory = write_run()
    edit_trace(directory, lambda event: None if event["name"] == "exchange" else event)
    assert mixing(read_run(directory)) is None


def test_odd_attributes_are_left_out(write_run):
    directory = write_run()

    def spoil(event):
        if event["name"] == "exchange" and event["pid"] == 0 and event["args"]["round"] == 5:
            event["args"] |= {"recv_from": 99}
        if event["name"] == "exchange" and event["pid"] == 0 and event["args"]["round"] == 6:
            event["args"] |= {"round": "six"}
        return event

    edit_trace(directory, spoil)
    found = mixing(read_run(directory))
    assert (found.observed[4][0], found.observed[5][0]) == (-1, -1)


def test_after_a_death_or_a_join_no_schedule_of_the_start_is_beside_it(write_run):
    directory = write_run()
    summary = json.loads((directory / "summary.json").read_text())
    joined = [{"rank": 4, "from_rank": 0, "steps": 3, "end": "finished"}]
    (directory / "summary.json").write_text(json.dumps(summary | {"joined": joined}))

    def change(event):
        if event["name"] == "exchange" and event["args"]["round"] >= 3:
            event["args"] |= {"generation": 1}
            event["args"] |= {"recv_from": 4} if event["pid"] == 2 else {}
        return event

    edit_trace(directory, change)
    found = mixing(read_run(directory))
    assert found.expected is None
    assert found.observed[2][2] == 4, "it took the part of the rank that joined"
    assert found.world_size == 5
    assert "lost or joined" in found.description
