"""`gossipgrad topology`."""

import json
import sys

import pytest

from gossipgrad import cli
from gossipgrad.cli._topology import TopologyOptions, run


def test_the_table_tells_the_properties(capsys):
    assert run(TopologyOptions(world_size=12, rounds=2)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(
        [cell.strip() for cell in line.split("\u2502")[1:3]] for line in lines if "\u2502" in line
    )
    assert rows["partners"] == "directed"
    assert rows["period"] == "4 rounds"
    assert rows["doubly stochastic"] == "yes"
    assert rows["spectral gap of a period"] == "0.8730"
    assert rows["rounds to contract 1000x"] == "13"
    assert rows["rank 0 in round 0"] == "sends to 7, receives from 11"
    assert "rank 0 in round 2" not in rows


def test_the_table_tells_what_was_not_reached_who_sits_out_and_what_is_estimated(capsys):
    assert run(TopologyOptions(world_size=41, schedule="ring", max_rounds=30, rounds=3)) == 0
    out = capsys.readouterr().out
    for part in ("more than 30", "sits out", "meets 40"):
        assert part in out
    assert run(TopologyOptions(world_size=300, schedule="matching", rounds=0)) == 0
    out = capsys.readouterr().out
    assert "at most 0.9" in out
    assert "Estimates" in out


def test_json(capsys):
    options = TopologyOptions(world_size=8, schedule="hypercube", rotate=False, rounds=2, json=True)
    assert run(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"]["name"] == "hypercube"
    assert found["symmetric"]
    assert found["exact"]
    assert found["spectral_gap"] == 1.0
    assert found["period"] == found["rounds_until_all_know_all"] == 3
    assert found["rank_0"] == [
        {"round": 0, "send_to": 1, "recv_from": 1},
        {"round": 1, "send_to": 2, "recv_from": 2},
    ]


def test_the_image_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mixing.png"
    assert run(TopologyOptions(world_size=12, schedule="matching", image=path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'gossipgrad\[pl"):
        run(TopologyOptions(world_size=4, image=tmp_path / "mixing.png"))


def test_what_does_not_fit_is_an_error_not_a_trace(tmp_path, capsys):
    assert cli.main(["topology", "--world-size", "12", "--schedule", "hypercube"]) == 2
    assert "power of two, got 12" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no folder .*missing"):
        run(TopologyOptions(world_size=4, image=tmp_path / "missing" / "mixing.png"))
    for options in ({"rounds": -1}, {"max_rounds": 0}, {"world_size": 2000, "image": tmp_path}):
        with pytest.raises(ValueError, match=r"-1|max-rounds 0|2000"):
            TopologyOptions(**{"world_size": 4, **options})
