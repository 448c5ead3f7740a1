"""The command line of workers that join a run."""

from pathlib import Path

import pytest

from gossipgrad import cli
from gossipgrad.cli._train import parse_join, print_joined
from gossipgrad.train import JoinConfig, JoinOutcome

OWN = "Its own are --nproc, --device, --data-dir, --threads, --quiet."


def test_a_run_to_join_and_what_is_this_machines_own():
    assert parse_join(["--join", "run"]) == JoinConfig(run=Path("run"), nproc=1)
    own = ["--nproc", "3", "--threads=2", "--device", "auto", "--data_dir", "d", "--quiet"]
    assert parse_join([*own, "--join=run"]) == JoinConfig(
        run=Path("run"), nproc=3, device="auto", data_dir=Path("d"), threads=2, quiet=True
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


@pytest.mark.parametrize("option", ["--encrypt", "--no-overwrite", "--overwrite"])
def test_so_are_flags(option):
    with pytest.raises(ValueError, match=f"^{option} is not for --join"):
        parse_join([option, "--join", "run"])


@pytest.mark.parametrize("option", ["--resume", "--config"])
def test_a_run_is_joined_or_started(option):
    with pytest.raises(
        ValueError,
        match=f"^{option} starts a run, and --join a takes part in one that is training: leave",
    ):
        parse_join(["--join", "a", option, "b"])


def test_one_run_is_joined():
    with pytest.raises(ValueError, match=r"^--join is given 2 times \(a, b\), but workers join"):
        parse_join(["--join", "a", "--join=b"])


def test_a_misspelt_option_is_told(capsys):
    with pytest.raises(SystemExit):
        parse_join(["--join", "run", "--nprocs", "2"])
    assert "--nprocs" in capsys.readouterr().err


def test_help_tells_of_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--join", "run", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Join the run of this folder, which is training" in told
    assert "all else is the run's." in told


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert cli.main(["train", "--join", str(tmp_path)]) == 2
    assert "holds no run: name the folder" in capsys.readouterr().err


def test_tells_what_each_did(capsys):
    parts = [
        {"rank": 3, "steps": 1200, "samples": 19_200, "left": False, "late": False},
        {"rank": 4, "steps": 7, "samples": 112, "left": True, "late": False},
        {"rank": 5, "steps": 9, "samples": 144, "left": False, "late": True},
    ]
    summary = {"accuracy": 0.95}
    print_joined(JoinOutcome(exit_code=0, run_dir=Path("run"), parts=parts, summary=summary))
    assert capsys.readouterr().out.splitlines() == [
        "rank 3 trained 1,200 steps on 19,200 samples, to the end of the run",
        "rank 4 trained 7 steps on 112 samples, and left the run, which goes on",
        "rank 5 trained 9 steps on 144 samples, but the run had ended as this worker came, and is "
        "put together without it",
        "accuracy 95.00%",
        "report run/report.html",
    ]
    failures = ["rank 5 was killed by SIGKILL"]
    print_joined(JoinOutcome(exit_code=0, run_dir=Path("run"), parts=parts[:1], failures=failures))
    assert capsys.readouterr().out.splitlines()[1:] == failures
    print_joined(JoinOutcome(exit_code=130, run_dir=Path("run"), parts=[]))
    assert capsys.readouterr().out == "stopped before a worker had joined; the run goes on\n"
