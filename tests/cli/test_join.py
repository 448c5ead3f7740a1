"""The command line of workers that join a run."""

from pathlib import Path

import pytest

from gossipgrad import cli
from gossipgrad.train import JoinConfig, JoinOutcome
from support.commands import given


def test_a_run_to_join_and_what_is_this_machines_own():
    assert given("--join", "run") == JoinConfig(run=Path("run"))
    own = ["--threads=2", "--device", "auto", "--data_dir", "d", "--quiet"]
    assert given(*own, "--join=run") == JoinConfig(
        run=Path("run"), device="auto", data_dir=Path("d"), threads=2, quiet=True
    )


@pytest.mark.parametrize("option", ["--strategy", "--local-steps", "--out", "--resume"])
def test_options_of_the_run_are_refused(option, capsys):
    assert cli.main(["train", "--join", "run", f"{option}=1"]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert "its own options are --device" in said


def test_workers_join_one_run(capsys):
    assert cli.main(["train", "--join", "a", "--join", "b"]) == 2
    assert "more than once" in capsys.readouterr().err


@pytest.mark.parametrize(("left", "end"), [(False, "to the end of the run"), (True, "and left")])
def test_tells_what_it_did(left, end, capsys, monkeypatch):
    made = {"rank": 3, "steps": 1200, "samples": 19_200}
    summary = (
        None if left else {"accuracy": 0.95, "metric_name": "accuracy", "metric_format": ".2%"}
    )
    outcome = JoinOutcome(exit_code=0, run_dir=Path("run"), **made, left=left, summary=summary)
    monkeypatch.setattr("gossipgrad.train.join_run", lambda config: outcome)
    assert cli.main(["train", "--join", "run"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"rank 3 trained 1,200 steps on 19,200 samples, {end}")
    assert others == ([] if left else ["accuracy 95.00%", "report run/report.html"])
