import io
import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gossipgrad import cli
from gossipgrad.errors import GossipError
from gossipgrad.train import Outcome, RunFailedError, TrainConfig, options_by_section
from support.commands import given


def test_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gossipgrad", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("gossipgrad", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("gossipgrad ")


@pytest.mark.parametrize("command", ["demo", "probe", "predict", "report", "export"])
def test_commands_explain_their_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"gossipgrad {command}" in capsys.readouterr().out


def test_missing_packages_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["train"]) == 2
    assert "pip install 'gossipgrad[cli]'" in capsys.readouterr().err


def test_short_help_of_train_names_every_option(capsys):
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 120
    names = ["config", "join", "nodes", "node_rank", "rendezvous"]
    names += [field.name for field in fields(TrainConfig) if field.name != "options"]
    for kind in options_by_section().values():
        names += [field.name for field in fields(kind)]
    listed = re.findall(r"^  --(\S+) ", shown, re.MULTILINE)
    assert sorted(listed) == sorted(name.replace("_", "-") for name in names)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no"), 2), (GossipError("no"), 2), (RunFailedError("no"), 1)],
)
def test_mistakes_are_one_line(monkeypatch, capsys, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("gossipgrad.train.run", fail)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == "gossipgrad: error: no\n"


@pytest.mark.parametrize(
    "line",
    [
        "train --no-such-option",
        "train --lr fast",
        "train --nproc 0",
        "train --data of-nobody",
        "train --faults none",
        "train --epochs",
        "demo --epochs many",
        "demo --out a-file",
        "probe --seconds",
        "predict 4-machines",
        "report --port http a-run",
        "export one-name",
    ],
)
def test_options_that_cannot_be_read_are_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("gossipgrad: error: ")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_line_says_what_is_wrong_in_any_terminal(encoding, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    for line, said in (
        ("train --no-such-option", "unrecognized options: --no-such-option; see"),
        ("train --epochs many", "--epochs: invalid literal for int() with base 10: 'many'; see"),
    ):
        assert cli.main(line.split()) == 2
        assert said in capsys.readouterr().err


def test_an_error_after_the_options_were_checked_keeps_its_traceback(monkeypatch, tmp_path):
    inside = ValueError("not enough values to unpack")

    def fail(*_, **__):
        raise inside

    monkeypatch.setattr("gossipgrad.train._run.launch", fail)
    with pytest.raises(RuntimeError) as raised:
        cli.main(["train", "--out", str(tmp_path), "--quiet"])
    assert raised.value.__cause__ is inside


def test_saved_configuration_is_repeated_and_overridden(tmp_path):
    saved = TrainConfig(lr=0.5, epochs=3).resolved(nproc=2, out=tmp_path)
    saved.write(tmp_path / "config.json")
    arguments = ["--config", str(tmp_path / "config.json")]
    repeated = given(*arguments)
    assert (repeated.lr, repeated.epochs, repeated.nproc, repeated.out) == (0.5, 3, 2, None)
    changed = given(*arguments, "--epochs", "9", "--topology", "ring", "--out", "x")
    assert (changed.lr, changed.epochs, changed.options["gossip"].topology) == (0.5, 9, "ring")
    assert str(changed.out) == "x"


@pytest.fixture
def saved(tmp_path):
    def save(**options):
        path = tmp_path / "config.json"
        TrainConfig(**options).resolved(nproc=2, out=tmp_path).write(path)
        return ["--config", str(path)]

    return save


@pytest.mark.filterwarnings("default:lr=0.5 of")
def test_another_optimizer_brings_its_own_learning_rate(saved, tmp_path, capsys):
    assert given(*saved(), "--optimizer", "adamw").lr is None
    assert given(*saved(), "--optimizer=adamw", "--lr=0.1").lr == 0.1
    assert given(*saved(lr=0.5), "--optimizer", "sgd").lr == 0.5
    run = tmp_path / "run"
    run.mkdir()
    TrainConfig(lr=0.5).resolved(nproc=2, out=run).write(run / "config.json")
    capsys.readouterr()
    for arguments, file in ((["--resume", str(run)], run), (saved(lr=0.5), "config.json")):
        config = given(*arguments, "--optimizer", "adamw")
        assert config.lr is None
        told = capsys.readouterr().err
        assert "lr=0.5 of" in told
        assert f"{file} is not used: it belongs to sgd" in told


@pytest.mark.parametrize(
    ("line", "gossip", "suda"),
    [
        ("--topology matching", "matching", "dissemination"),
        ("--topology=ring", "ring", "dissemination"),
        ("--suda.topology ring --topology hypercube", "hypercube", "ring"),
    ],
)
def test_a_short_name_goes_to_the_owner_that_is_chosen(line, gossip, suda):
    options = given(*line.split()).options
    assert options["gossip"].topology == gossip
    assert options["suda"].topology == suda


def test_a_given_world_replaces_the_saved_number_of_processes(saved, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert given(*saved()).nproc is None
    assert given(*saved(), "--nproc", "4").nproc == 4


def test_demo_is_refused_where_the_world_is_given(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["demo"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("epochs", ["0", "100000"])
def test_demo_names_the_epochs_that_it_refuses(epochs, tmp_path, capsys):
    assert cli.main(["demo", "--epochs", epochs, "--out", str(tmp_path / "demo")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"gossipgrad: error: epochs is {epochs}, but must be from 1 to 10000.")
    assert not (tmp_path / "demo").exists()


@pytest.mark.process
def test_demo_trains_both_ways_over_slow_links_and_says_what_that_gains(tmp_path, capfd):
    options = ["--nproc", "2", "--epochs", "1", "--mbit-per-second", "50"]
    assert cli.main(["demo", *options, "--out", str(tmp_path)]) == 0
    *_, verdict, page = capfd.readouterr().out.splitlines()
    assert re.fullmatch(
        r"gossip takes \d+\.\d\d of all-reduce's time a step, and its accuracy is "
        r"\d+\.\d\d points (higher|lower)",
        verdict,
    )
    assert Path(page.removeprefix("side by side: ")).stat().st_size > 0
    reduced = json.loads((tmp_path / "allreduce" / "summary.json").read_text())
    assert reduced["exposed_seconds_per_step"] >= 8 * 4 * 26_122 / 50e6, "every step waits"


def test_demo_replaces_no_run_of_another_command(tmp_path, capsys):
    (tmp_path / "gossip").mkdir()
    (tmp_path / "gossip" / "model.safetensors").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "gossip" / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("begun", "told"),
    [
        (True, "stopped at once; metrics and checkpoints so far are kept in x\n"),
        (False, "stopped by SIGINT before all workers had started; nothing was learned\n"),
    ],
)
def test_a_run_without_results_says_how_far_it_came(begun, told, capsys, monkeypatch):
    outcome = Outcome(exit_code=130, begun=begun, run_dir=Path("x"))
    monkeypatch.setattr("gossipgrad.train.run", lambda config, **_: outcome)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().out == told


def test_without_a_command_that_is_known_the_known_ones_are_told(capsys):
    assert cli.main([]) == cli.main(["trian"]) == 2
    assert cli.main(["--help"]) == cli.main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert all(name in out and name in err for name in ("train", "launch", "predict", "export"))
