"""A run that is cut short and resumed comes to what it would have, bit for bit."""

import dataclasses
import random
import threading

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad import checkpoint, data
from gossipgrad.train import RunFailedError, TrainConfig, config_of_run, run
from gossipgrad.train._layout import claim
from gossipgrad.train._rank import train_rank
from gossipgrad.train._resume import reopen
from support.launched import after_steps, config, press_ctrl_c, workers
from support.resumed_runs import assert_same_runs, state_of


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture
def alone(digits, tmp_path):
    """Trains one rank alone in this process; stops it after some steps, or resumes it."""
    threads = torch.get_num_threads()

    def train(name, *, stop_after=None, resumes=False, **options):
        stop = threading.Event()

        def emit(event):
            if event.get("step", 0) >= (stop_after or 1 << 30):
                stop.set()

        if resumes:
            given = dataclasses.replace(config_of_run(tmp_path / name), **options)
            chosen, run_dir = reopen(given)
        else:
            run_dir = claim(tmp_path / name, name="", overwrite=True)
            usual = {"log_every": 1, "trace": 0, "batch_size": 64, "checkpoint_every": 7}
            chosen = TrainConfig(strategy="local", **usual | options)
        chosen = chosen.resolved(nproc=1, out=run_dir.path)
        chosen.write(run_dir.config, {})
        result = train_rank(chosen, digits, run_dir, rank=0, world_size=1, stop=stop, emit=emit)
        return result, run_dir

    yield train
    torch.set_num_threads(threads)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(alone, tmp_path):
    whole, _ = alone("whole", epochs=3)
    stopped, run_dir = alone("stopped", epochs=3, stop_after=30)
    assert stopped.stopped
    assert 30 <= stopped.steps < whole.steps
    assert max(checkpoint.steps(run_dir.checkpoints)) == stopped.steps
    resumed, _ = alone("stopped", resumes=True)
    assert (resumed.steps, resumed.samples, resumed.epochs) == (69, whole.samples, 3)
    assert resumed.accuracy == whole.accuracy
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole", 1)


def test_a_run_that_has_ended_goes_on_for_more_epochs(alone, tmp_path):
    alone("long", epochs=3, lr_schedule="constant")
    alone("short", epochs=2, lr_schedule="constant")
    resumed, _ = alone("short", resumes=True, epochs=3)
    assert resumed.epochs == 3
    assert_same_runs(tmp_path / "short", tmp_path / "long", 1)


def test_a_step_can_be_chosen_and_what_came_after_it_is_removed(alone, tmp_path):
    alone("whole", epochs=1, keep_checkpoints=9)
    alone("again", epochs=1, keep_checkpoints=9)
    alone("again", resumes=True, resume_step=14)
    assert_same_runs(tmp_path / "again", tmp_path / "whole", 1)


def test_resuming_is_refused_with_the_reason(alone, tmp_path):
    alone("run", epochs=1)
    saved = config_of_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"batch_size is 8, but the run in .* has batch_size=64"):
        reopen(dataclasses.replace(saved, batch_size=8))
    with pytest.raises(ValueError, match="leave --out out, or copy the folder"):
        reopen(dataclasses.replace(saved, out=tmp_path / "other"))
    with pytest.raises(ValueError, match=r"resume_step is 8, but .* are of steps 21, 23"):
        reopen(dataclasses.replace(saved, resume_step=8))
    with pytest.raises(ValueError, match=r"cannot read .*config.json.*; name the config.json"):
        config_of_run(tmp_path / "nowhere")
    alone("bare", epochs=1, checkpoint_every=None)
    with pytest.raises(ValueError, match=r"bare has no checkpoint .*with --checkpoint-every"):
        reopen(config_of_run(tmp_path / "bare"))
    with pytest.raises(ValueError, match="resume_step is 3, but no run is resumed"):
        TrainConfig(resume_step=3)
    # Epochs, and what changes no figure, may be others.
    reopen(dataclasses.replace(saved, epochs=2, log_every=5, keep_checkpoints=4))


def test_a_damaged_checkpoint_is_refused_and_older_ones_are_named(alone, tmp_path):
    _, run_dir = alone("run", epochs=1)
    (newest,) = (run_dir.checkpoints / "step-000000023" / "rank-0000").glob("*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"step 23 cannot be resumed: .*safetensors.*21"):
        alone("run", resumes=True)
    resumed, _ = alone("run", resumes=True, resume_step=21)
    assert resumed.steps == 23


@pytest.mark.process
def test_all_are_killed_and_the_run_is_resumed_bit_for_bit(tmp_path):
    """Killed at a random step, of which the seed is told; the second time is by Ctrl-C."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    options = {"nproc": 2, "epochs": 2, "trace": 0, "checkpoint_every": 4}
    run(config(tmp_path / "whole", **options))

    def kill_all():
        for worker in list(workers().values()):
            worker.kill()

    killed = tmp_path / "killed"
    first = random.Random(seed).randrange(12, 40)
    with after_steps(killed, first, kill_all), pytest.raises(RunFailedError):
        run(config(killed, **options))
    assert checkpoint.latest(killed / "checkpoints") is not None
    with after_steps(killed, first + 20, press_ctrl_c):
        run(config_of_run(killed))
    assert len({state_of(killed, rank)["session"]["steps"] for rank in range(2)}) == 1
    run(config_of_run(killed))
    assert_same_runs(killed, tmp_path / "whole", 2)
    models = [load_file(path / "model.safetensors") for path in (killed, tmp_path / "whole")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
