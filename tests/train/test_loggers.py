"""TensorBoard and Weights & Biases beside the metrics file, and what happens when they fail."""

import importlib.machinery
import sys
import types

import pytest

from gossipgrad.train import TrainConfig, check, run
from support.alone import events, resume_alone, run_alone
from support.launched import config


@pytest.fixture
def fake_wandb(monkeypatch):
    """A package that keeps what `init` is given and what is logged, and may fail."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    module.given, module.logged, module.finished, module.fails_in = {}, [], 0, None

    def fail(call):
        if module.fails_in == call:
            raise OSError("no network")

    class Run:
        def log(self, scalars, *, step):
            fail("log")
            module.logged.append((step, scalars))

        def finish(self):
            fail("finish")
            module.finished += 1

    def init(**given):
        fail("init")
        module.given.update(given)
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def train(out, **options):
    return run_alone(out, epochs=1, batch_size=100, **options).summary


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_has_the_figures_of_the_metrics_file(tmp_path):
    assert train(tmp_path, tensorboard=True)["notes"] == []
    found = read(tmp_path / "tensorboard" / "rank0")
    (loss,), (step,) = found.Scalars("step/loss"), events(tmp_path)
    assert (loss.step, loss.value) == (step["step"], pytest.approx(step["loss"]))
    (accuracy,), (epoch,) = found.Scalars("epoch/accuracy"), events(tmp_path, "epoch")
    assert (accuracy.step, accuracy.value) == (15, pytest.approx(epoch["accuracy"]))
    assert "step/step" not in found.Tags()["scalars"]


def test_a_resumed_run_replaces_the_steps_it_makes_again(tmp_path, fake_wandb):
    """Those between the checkpoint and the end of the last start; at W&B it is the same run."""
    loggers = {"tensorboard": True, "wandb": "mine", "log_every": 1}
    train(tmp_path, checkpoint_every=5, keep_checkpoints=9, **loggers)
    first = fake_wandb.given["id"]
    resume_alone(tmp_path, resume_step=5)
    found = read(tmp_path / "tensorboard" / "rank0")
    assert [one.step for one in found.Scalars("step/loss")] == [*range(1, 16)]
    assert fake_wandb.given["id"] == first
    assert fake_wandb.given["resume"] == "allow"


@pytest.mark.process
def test_every_rank_has_a_folder_of_its_own_and_overwrite_empties_it(tmp_path):
    run(config(tmp_path, nproc=2, max_steps=3, trace=0, tensorboard=True))
    found = [*tmp_path.glob("tensorboard/rank*/events*")]
    assert {path.parent.name for path in found} == {"rank0", "rank1"}
    train(tmp_path)
    assert not any(path.exists() for path in found)


def test_wandb_gets_the_options_and_the_figures_of_rank_0(tmp_path, fake_wandb):
    train(tmp_path / "run", wandb="my project")
    assert (fake_wandb.given["project"], fake_wandb.given["name"]) == ("my project", "run")
    assert fake_wandb.given["dir"] == str(tmp_path / "run")
    assert fake_wandb.given["config"]["batch_size"] == 100
    assert "mode" not in fake_wandb.given, "WANDB_MODE decides"
    (step,), (epoch,) = (events(tmp_path / "run", kind) for kind in ("step", "epoch"))
    assert [at for at, _ in fake_wandb.logged] == [10, 15]
    assert fake_wandb.logged[0][1]["step/loss"] == step["loss"]
    assert fake_wandb.logged[1][1]["epoch/accuracy"] == epoch["accuracy"]
    assert fake_wandb.finished == 1


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_training_continues_without_a_logger_that_raises(tmp_path, fake_wandb, call):
    fake_wandb.fails_in = call
    with pytest.warns(UserWarning, match="wandb has stopped .*OSError: no network") as warned:
        summary = train(tmp_path, wandb="mine", tensorboard=True)
    assert len(warned) == 1
    assert summary["steps"] == 15
    assert summary["notes"] == ["rank 0: wandb has stopped (OSError: no network)"]
    assert len(read(tmp_path / "tensorboard" / "rank0").Scalars("step/loss")) == 1


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_told_before_the_start(monkeypatch, package):
    nothing = types.SimpleNamespace(find_spec=lambda *_: None)
    monkeypatch.setattr(sys, "meta_path", [nothing])
    monkeypatch.delitem(sys.modules, package, raising=False)
    config = TrainConfig(**{package: True if package == "tensorboard" else "mine"})
    message = rf"--{package} needs the package {package}: pip install 'gossipgrad\[{package}\]'"
    with pytest.raises(ValueError, match=message):
        check(config, 2)


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="--wandb needs the package wandb: pip install"):
        check(TrainConfig(wandb="project"), 2)
