"""The comparison of predicted with measured cells, on cells that are made up."""

import json

import pytest

from benchmarks import simulate_check
from benchmarks.network._kinds import BARE, GOSSIP


def cell(contestant, seconds, **others):
    return {
        "contestant": contestant,
        "world_size": 4,
        "rate_bits_per_second": 1e8,
        "profile": "resnet50",
        "time_factor": 1.5,
        "size_factor": 0.045,
        "step_seconds_median": seconds,
        "marks": [],
        **others,
    }


def run(monkeypatch, path):
    monkeypatch.setattr("sys.argv", ["simulate_check", "--cells", str(path)])
    return simulate_check.main()


def test_every_measured_cell_that_is_modelled_has_a_row(tmp_path, monkeypatch):
    compute = 1.5 * 0.29193
    cells = [cell(name, 1.0) for name in simulate_check.CONTESTANTS]
    cells += [
        cell("no communication", compute),
        cell("ddp, PowerSGD", 1.0),
        cell("bare exchange", 1.0),
        cell("gossip", None, error="it failed", marks=["busy"]),
        cell("no communication", compute / 2, marks=["busy"], rate_bits_per_second=1e9),
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"cells": cells}))
    assert run(monkeypatch, path) == 0
    written = json.loads((tmp_path / "mine_simulate_check.json").read_text())
    assert written["not_modelled"] == ["ddp, PowerSGD"]
    rows = written["rows"]
    assert len(rows) == len(simulate_check.CONTESTANTS) + 2
    assert written["summary"]["from_rate"]["cells"] == len(rows) - 1, (
        "the marked one claims nothing"
    )
    alone = [row for row in rows if row["contestant"] == "no communication"]
    assert alone[1]["from_rate_error"] == pytest.approx(0, abs=1e-3)
    assert alone[2]["from_rate_error"] == pytest.approx(1, abs=1e-3)


def test_contestants_are_those_of_the_grid():
    assert simulate_check.CONTESTANTS.keys() | {
        "ddp, PowerSGD",
        "gossip, sync, in backward",
    } == GOSSIP.keys() - {*BARE}


@pytest.mark.parametrize("content", ["not json", "{}", '{"cells": [{"a": 1}]}', "[3]"])
def test_files_of_something_else_are_refused(tmp_path, monkeypatch, capsys, content):
    path = tmp_path / "network.json"
    path.write_text(content)
    assert run(monkeypatch, path) == 2
    assert str(path) in capsys.readouterr().err
