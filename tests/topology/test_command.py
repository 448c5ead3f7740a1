"""`gossipgrad topology`."""

import json
import sys

import pytest
import tyro

from gossipgrad import cli
from gossipgrad.cli._topology import TopologyOptions, run


def test_the_table_tells_the_properties(capsys):
    assert run(TopologyOptions(world_size=12, rounds=2)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(
        [cell.strip() for cell in line.split("\u2502")[1:3]] for line in lines if "\u2502" in line
    )
    assert "dissemination, 12 ranks" in lines[0]
    assert rows == {
        "partners": "directed",
        "period": "4 rounds",
        "after a period": "new labels, seed 0",
        "doubly stochastic": "yes",
        "spectral gap of a period": "0.8730",
        "rounds to contract 10x": "5",
        "rounds to contract 1000x": "13",
        "rounds until all know all": "4",
        "rank 0 in round 0": "sends to 7, receives from 11",
        "rank 0 in round 1": "sends to 8, receives from 9",
    }


def test_what_was_not_reached_and_who_sits_out(capsys):
    assert run(TopologyOptions(world_size=41, schedule="ring", max_rounds=30, rounds=3)) == 0
    out = capsys.readouterr().out
    assert "the same again" in out
    assert "more than 30" in out
    assert "sits out" in out
    assert "meets 40" in out


def test_estimates_are_called_estimates(capsys):
    assert run(TopologyOptions(world_size=300, schedule="matching", rounds=0)) == 0
    out = capsys.readouterr().out
    assert "at most 0.9" in out
    assert "about " in out
    assert "Estimates, from random vectors and a sample of the ranks." in out
    assert "rank 0" not in out


def test_json(capsys):
    options = TopologyOptions(
        world_size=8, schedule="hypercube", rotate=False, rounds=2, json=True, seed=3
    )
    assert run(options) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schedule": {"name": "hypercube", "world_size": 8, "rotate": False, "seed": None},
        "symmetric": True,
        "period": 3,
        "weight": 0.5,
        "max_rounds": 1000,
        "exact": True,
        "doubly_stochastic": True,
        "spectral_gap": 1.0,
        "rounds_to_contract_10x": 3,
        "rounds_to_contract_1000x": 3,
        "rounds_until_all_know_all": 3,
        "rank_0": [
            {"round": 0, "send_to": 1, "recv_from": 1},
            {"round": 1, "send_to": 2, "recv_from": 2},
        ],
        "image": None,
    }


def test_the_image_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mixing.png"
    assert run(TopologyOptions(world_size=12, schedule="matching", image=path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    path = tmp_path / "mixing.png"
    with pytest.raises(ValueError, match=r"--image needs matplotlib.*pip install 'gossipgrad\[pl"):
        run(TopologyOptions(world_size=4, image=path))
    assert capsys.readouterr().out == ""
    assert not path.exists()


def test_what_does_not_fit_is_an_error_not_a_trace(tmp_path, capsys):
    assert cli.main(["topology", "--world-size", "12", "--schedule", "hypercube"]) == 2
    assert capsys.readouterr().err.startswith(
        "gossipgrad: error: hypercube needs a world size that is a power of two, got 12"
    )
    with pytest.raises(ValueError, match="No such file or directory"):
        run(TopologyOptions(world_size=4, image=tmp_path / "missing" / "mixing.png"))


def test_one_rank_is_singular(capsys):
    assert run(TopologyOptions(world_size=1, rounds=0)) == 0
    assert "dissemination, 1 rank " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": -1}, "rounds -1 is negative: list 0 or more"),
        ({"max_rounds": 0}, "max-rounds 0 leaves nothing to count: give 1 or more"),
        ({"world_size": 2000, "image": "x.png"}, "of 2000 ranks is too large to draw"),
    ],
)
def test_bad_options_are_named_with_the_way_out(tmp_path, options, message):
    if "image" in options:
        options = {**options, "image": tmp_path / options["image"]}
    with pytest.raises(ValueError, match=message):
        TopologyOptions(**{"world_size": 4, **options})


def test_options_come_from_the_command_line(capsys):
    arguments = "--world-size 6 --schedule matching --no-rotate --seed 2 --rounds 1 --weight 0.4"
    options = tyro.cli(TopologyOptions, args=arguments.split())
    assert options == TopologyOptions(
        world_size=6, schedule="matching", rotate=False, seed=2, rounds=1, weight=0.4
    )
    with pytest.raises(SystemExit):
        tyro.cli(TopologyOptions, args=["--help"])
    help_text = capsys.readouterr().out
    assert "Picks the relabellings." in help_text
    assert "--no-rotate" in help_text
