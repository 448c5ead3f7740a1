"""`gossipgrad advise` prints a table and a recommendation, or JSON."""

import json

from gossipgrad.cli import main


def test_it_recommends_and_says_why(capsys):
    assert main(["advise", "--world-size", "8", "--bandwidth", "1Gbit"]) == 0
    said = capsys.readouterr().out
    assert "use gg." in said
    assert "DistributedDataParallel" in said


def test_json_has_all_choices_the_fastest_first(capsys):
    assert main(["advise", "--optimizer", "adam", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [choice["prediction"]["step_seconds"] for choice in found["choices"]]
    assert steps == sorted(steps)
    assert found["best"]["loss"] <= 0.5


def test_two_sources_of_the_network_are_refused(capsys, tmp_path):
    assert main(["advise", "--bandwidth", "1Gbit", "--network", str(tmp_path / "none.json")]) == 2
    assert "--network" in capsys.readouterr().err
