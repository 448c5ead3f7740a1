"""Outcomes by rank, and rounds late."""

import json
import re

import pytest

from gossipgrad.trace._bars import bars
from gossipgrad.trace._exchanges import outcome_counts, outcomes_by_rank, rounds_late
from gossipgrad.trace._runs import Run, read_run
from gossipgrad.trace._spans import Span, Spans


def traced(*spans: tuple) -> Run:
    """A run that has left a trace and nothing else."""
    return Run(
        name="traced",
        world_size=4,
        config={},
        summary={},
        steps={},
        epochs={},
        trace=Spans(spans=[Span(rank, 1, name, a, b, args) for rank, name, a, b, args in spans]),
        problems=(),
    )


def test_outcomes_are_those_the_metrics_last_told(write_run):
    run = read_run(write_run(world_size=2))
    assert outcomes_by_rank(run) == {rank: {"delivered": 28, "late": 2} for rank in (0, 1)}
    assert outcome_counts(run)["delivered"] == 118, "the summary has the whole run"


def test_outcomes_come_from_the_trace_where_nothing_else_tells():
    run = traced(
        (0, "exchange", 0.0, 1.0, {"outcome": "delivered"}),
        (0, "exchange", 1.0, 2.0, {"outcome": "void"}),
        (3, "exchange", 0.0, 1.0, {"outcome": "delivered"}),
        (2, "exchange", 0.0, 1.0, {"bucket": 0}),
    )
    assert outcomes_by_rank(run) == {0: {"delivered": 1, "void": 1}, 3: {"delivered": 1}}
    assert outcome_counts(run) == {"delivered": 2, "void": 1}


def test_counts_the_rounds_begun_since():
    run = traced(
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
    assert rounds_late(run) == {0: {"0": 2, "1": 1, "4 or more": 1}}


def test_bars_of_one_run_have_a_row_a_rank(write_run):
    found = {each.id: each for each in bars([read_run(write_run())])}
    assert list(found) == ["traffic", "rates", "outcomes", "lateness"]
    rows = {bar.label: (dict(bar.parts), bar.note) for bar in found["traffic"].bars}
    assert rows == {
        "sent": ({"exchanges": 1000.0}, "1 kB, 67%"),
        "ring all-reduce": ({"reference": 1500.0}, "1.5 kB"),
    }
    assert [bar.label for bar in found["outcomes"].bars] == [
        "all workers",
        *(f"rank {rank}" for rank in range(4)),
    ]
    assert found["outcomes"].bars[1].note == "93.3% of 30"
    assert found["outcomes"].bars[1].parts == {"delivered": 28.0, "late": 2.0}
    assert [bar.note for bar in found["lateness"].bars] == ["100.0% of 30"] * 4
    assert found["traffic"].table() == (
        ["", "parameters or gradients", "ring all-reduce, computed"],
        [["sent", "1 kB", "0 B"], ["ring all-reduce", "0 B", "1.5 kB"]],
    )


def test_a_rank_that_left_nothing_has_an_empty_row(write_run):
    directory = write_run()
    (directory / "metrics-rank2.jsonl").unlink()
    found = {each.id: each for each in bars([read_run(directory)])}
    assert found["rates"].bars[2].parts == {}
    assert found["rates"].table()[1][2] == ["rank 2", "n/a"]


def test_the_ring_shuffle_is_part_of_what_is_sent(write_run):
    directory = write_run()
    path = directory / "summary.json"
    told = json.loads(path.read_text()) | {"shuffle_bytes_sent_per_step": 250}
    path.write_text(json.dumps(told))
    found = {each.id: each for each in bars([read_run(directory)])}
    assert found["traffic"].bars[0].parts == {"exchanges": 1000.0, "shuffle": 250.0}
    assert found["traffic"].kinds["shuffle"] == "ring shuffle of samples"


def test_a_computed_figure_is_called_one(write_run):
    directory = write_run()
    path = directory / "summary.json"
    told = json.loads(path.read_text()) | {"bytes_sent_are": "computed: ring all-reduce"}
    path.write_text(json.dumps(told))
    assert bars([read_run(directory)])[0].bars[0].label == "sent (computed)"


@pytest.mark.parametrize("told", [None, [], {"delivered": "many"}, "x"])
def test_outcomes_that_are_none_are_no_bars(write_run, told):
    directory = write_run(world_size=2)
    path = directory / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outcomes": told}))
    found = {each.id: each for each in bars([read_run(directory)])}
    assert found["outcomes"].bars[0].parts == {}
    assert found["outcomes"].bars[1].parts


def test_of_many_workers_the_worst_are_drawn_and_all_are_in_the_table(write_run):
    directory = write_run(world_size=20)
    for rank, slower in ((3, 32), (17, 3)):
        path = directory / f"metrics-rank{rank}.jsonl"
        text = re.sub(
            r'(?<="train_seconds": )[\d.]+',
            lambda found, times=slower: str(times * float(found[0])),
            path.read_text(),
        )
        path.write_text(
            text.replace('{"delivered": 28, "late": 2}', '{"delivered": 8, "late": 22}')
        )
    found = {each.id: each for each in bars([read_run(directory)])}
    drawn = [bar.label for bar in found["rates"].bars]
    assert len(drawn) == 12
    assert {"rank 3", "rank 17"} <= set(drawn)
    assert "The 12 slowest of 20 are drawn; the table has the others, too." in (
        found["rates"].description
    )
    assert len(found["rates"].table()[1]) == 20
    assert {"all workers", "rank 3", "rank 17"} <= {bar.label for bar in found["outcomes"].bars}
    assert len(found["outcomes"].table()[1]) == 21
