"""The command line of workers that join a run."""

from pathlib import Path

import pytest

from gossipgrad import cli
from gossipgrad.cli._train import parse_join, print_joined
from gossipgrad.train import JoinConfig, JoinOutcome

OWN = "Its own are --device, --data-dir, --threads, --quiet."


def test_a_run_to_join_and_what_is_this_machines_own():
    assert parse_join(["--join", "run"]) == JoinConfig(run=Path("run"))
    own = ["--threads=2", "--device", "auto", "--data_dir", "d", "--quiet"]
    assert parse_join([*own, "--join=run"]) == JoinConfig(
        run=Path("run"), device="auto", data_dir=Path("d"), threads=2, quiet=True
    )
    assert parse_join(["--nproc", "3"]) is None


@pytest.mark.parametrize(
    "option", ["--strategy", "--batch-size", "--mode", "--local-steps", "--out", "--lr", "--seed"]
)
def test_options_of_the_run_are_refused(option, capsys):
    assert cli.main(["train", "--join", "run", f"{option}=1"]) == 2
    assert capsys.readouterr().err == (
        f"gossipgrad: error: {option} is not for --join: a worker that joins trains as the run in "
        f"run does, by its config.json; leave {option} out. {OWN}\n"
    )


@pytest.mark.parametrize("option", ["--resume", "--config"])
def test_a_run_is_joined_or_started(option):
    with pytest.raises(
        ValueError,
        match=f"^{option} starts a run, and --join a takes part in one that is training: leave",
    ):
        parse_join(["--join", "a", option, "b"])


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert cli.main(["train", "--join", str(tmp_path)]) == 2
    assert "holds no run: name the folder" in capsys.readouterr().err


@pytest.mark.parametrize(("left", "end"), [(False, "to the end of the run"), (True, "and left")])
def test_tells_what_it_did(left, end, capsys):
    made = {"rank": 3, "steps": 1200, "samples": 19_200}
    summary = (
        None if left else {"accuracy": 0.95, "metric_name": "accuracy", "metric_format": ".2%"}
    )
    print_joined(JoinOutcome(exit_code=0, run_dir=Path("run"), **made, left=left, summary=summary))
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"rank 3 trained 1,200 steps on 19,200 samples, {end}")
    assert others == ([] if left else ["accuracy 95.00%", "report run/report.html"])
