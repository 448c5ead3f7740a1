"""TensorBoard and Weights & Biases beside the metrics file, and what happens when they fail."""

import importlib.machinery
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from gossipgrad.train import TrainConfig, _loggers, check, config_of_run
from gossipgrad.train._folder import RunDir, claim
from gossipgrad.train._loggers import Loggers, check_loggers, open_loggers
from gossipgrad.train._state import reopen
from support.alone import begin_alone, train_alone


class Kept:
    """Keeps what it is told, and fails from a given call on."""

    def __init__(self, *, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def log(self, step, scalars):
        if len(self.told) == self._fails_at:
            raise OSError("no space left")
        self.told.append((step, dict(scalars)))

    def close(self):
        if self._fails_to_close:
            raise OSError("no space left")
        self.closed = True


@pytest.fixture
def fake_wandb(monkeypatch):
    """A package that keeps what `init` is given and what is logged."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    module.given, module.logged, module.finished = {}, [], 0

    class Run:
        def log(self, scalars, *, step):
            module.logged.append((step, scalars))

        def finish(self):
            module.finished += 1

    def init(**given):
        module.given.update(given)
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def train(tmp_path: Path, **options) -> tuple:
    config, run_dir = begin_alone(tmp_path / "run", epochs=1, batch_size=100, **options)
    return train_alone(config, run_dir), run_dir


def records(run_dir: RunDir, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in run_dir.metrics(rank).read_text().splitlines()]


def test_tensorboard_has_the_figures_of_the_metrics_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result, run_dir = train(tmp_path, tensorboard=True)
    assert result.notes == ()
    read = EventAccumulator(str(run_dir.tensorboard(0)))
    read.Reload()
    (loss,) = read.Scalars("step/loss")
    step, epoch = records(run_dir)
    assert (loss.step, loss.value) == (step["step"], pytest.approx(step["loss"]))
    (accuracy,) = read.Scalars("epoch/accuracy")
    assert (accuracy.step, accuracy.value) == (15, pytest.approx(epoch["accuracy"]))
    assert "step/step" not in read.Tags()["scalars"]


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path, fake_wandb):
    """Those between the checkpoint and the end of the last start; at W&B it is the same run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = {"tensorboard": True, "wandb": "mine", "log_every": 1}
    config, run_dir = begin_alone(
        tmp_path / "run",
        epochs=1,
        batch_size=100,
        checkpoint_every=5,
        keep_checkpoints=9,
        **loggers,
    )
    train_alone(config, run_dir)
    first = fake_wandb.given["id"]
    given = replace(config_of_run(run_dir.path), resume_step=5)
    config, run_dir = reopen(given)
    train_alone(config.resolved(nproc=1, out=run_dir.path), run_dir)
    read = EventAccumulator(str(run_dir.tensorboard(0)))
    read.Reload()
    assert [one.step for one in read.Scalars("step/loss")] == [*range(1, 16)]
    assert fake_wandb.given["id"] == first
    assert fake_wandb.given["resume"] == "allow"


def test_every_rank_has_a_folder_of_its_own_and_overwrite_empties_it(tmp_path):
    run_dir = claim(tmp_path, name="", overwrite=False)
    config = TrainConfig(tensorboard=True).resolved(nproc=4, out=tmp_path)
    config.write(run_dir.config)
    for rank in (0, 3):
        open_loggers(config, run_dir, rank).close()
    found = [*tmp_path.glob("tensorboard/rank*/events*")]
    assert {path.parent.name for path in found} == {"rank0", "rank3"}
    claim(tmp_path, name="", overwrite=True)
    assert not any(path.exists() for path in found)


def test_wandb_gets_the_options_and_the_figures_of_rank_0(tmp_path, fake_wandb):
    _, run_dir = train(tmp_path, wandb="my project")
    assert (fake_wandb.given["project"], fake_wandb.given["name"]) == ("my project", "run")
    assert fake_wandb.given["dir"] == str(run_dir.path)
    assert fake_wandb.given["config"]["batch_size"] == 100
    assert "mode" not in fake_wandb.given, "WANDB_MODE decides"
    step, epoch = records(run_dir)
    assert [at for at, _ in fake_wandb.logged] == [10, 15]
    assert fake_wandb.logged[0][1]["step/loss"] == step["loss"]
    assert fake_wandb.logged[1][1]["epoch/accuracy"] == epoch["accuracy"]
    assert fake_wandb.finished == 1


def test_wandb_is_left_to_rank_0(tmp_path, fake_wandb):
    config = TrainConfig(wandb="mine")
    open_loggers(config, RunDir(tmp_path), 1).log(1, {"loss": 1.0})
    assert not fake_wandb.given
    assert not fake_wandb.logged


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_told_before_the_start(monkeypatch, package):
    monkeypatch.setattr(_loggers, "find_spec", lambda name: None)
    config = TrainConfig(**{package: True if package == "tensorboard" else "mine"})
    message = rf"--{package} needs the package {package}: pip install 'gossipgrad\[{package}\]'"
    with pytest.raises(ValueError, match=message):
        check(config, 2)
    check_loggers(TrainConfig())


def test_a_project_has_a_name():
    with pytest.raises(ValueError, match="wandb is '', but must be a name"):
        TrainConfig(wandb="")


def test_a_logger_that_raises_is_let_go_with_one_warning():
    broken, whole = Kept(fails_at=1), Kept()
    loggers = Loggers({"broken": lambda: broken, "whole": lambda: whole})
    loggers.log(1, {"loss": 1.0})
    with pytest.warns(UserWarning, match=r"broken has stopped \(OSError: no space left\)") as seen:
        loggers.log(2, {"loss": 1.0})
    assert len(seen) == 1
    loggers.log(3, {"loss": 1.0})
    loggers.close()
    assert [step for step, _ in broken.told] == [1]
    assert [step for step, _ in whole.told] == [1, 2, 3]
    assert (broken.closed, whole.closed) == (False, True)
    assert loggers.notes == ["broken has stopped (OSError: no space left)"]


def test_a_logger_that_cannot_be_opened_or_closed_costs_a_warning():
    def fail():
        raise RuntimeError("no login")

    with pytest.warns(UserWarning, match="first has stopped .*no login.*training goes on without"):
        loggers = Loggers({"first": fail, "second": lambda: Kept(fails_to_close=True)})
    with pytest.warns(UserWarning, match="second has stopped"):
        loggers.close()
    loggers.log(1, {})


def test_training_goes_on_and_the_run_says_what_stopped(tmp_path, fake_wandb):
    def init(**given):
        raise RuntimeError("no network")

    fake_wandb.init = init
    with pytest.warns(UserWarning, match="wandb has stopped"):
        result, run_dir = train(tmp_path, wandb="mine")
    assert result.steps == 15
    assert result.notes == ("wandb has stopped (RuntimeError: no network)",)
    assert len(records(run_dir)) == 2


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="--wandb needs the package wandb: pip install"):
        check_loggers(TrainConfig(wandb="project"))
