"""A run that is cut short and resumed comes to what it would have, bit for bit."""

import dataclasses
import random
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad import checkpoint
from gossipgrad.train import RunFailedError, TrainConfig, _state, config_of_run, run
from gossipgrad.train._state import reopen
from support.alone import begin_alone, train_alone
from support.launched import after_steps, config, press_ctrl_c, workers
from support.resumed_runs import assert_same_runs, state_of


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Trains one rank alone in this process; stops it after some steps, or resumes it.

    However slow the disk is, the checkpoint before is awaited, and none left out.
    """
    monkeypatch.setattr(_state, "_WRITE_SECONDS", 50.0)

    def train(name, *, stop_after=None, resumes=False, **options):
        stop = threading.Event()

        def emit(event):
            if event.get("step", 0) >= (stop_after or 1 << 30):
                stop.set()

        if resumes:
            given = dataclasses.replace(config_of_run(tmp_path / name), **options)
            config, run_dir = reopen(given)
            config = config.resolved(nproc=1, out=run_dir.path)
        else:
            usual = {"log_every": 1, "trace": 0, "batch_size": 64, "checkpoint_every": 7}
            config, run_dir = begin_alone(tmp_path / name, **usual | options)
        return train_alone(config, run_dir, stop=stop, emit=emit), run_dir

    return train


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


def test_a_second_order_run_goes_on_bit_for_bit_with_roots_on_their_way(alone, tmp_path):
    roots = {"refresh": "background", "refresh_every": 4, "max_staleness": 3, "max_dim": 64}
    options = {"optimizer": "soap", "lr": 3e-3, "trace": 40, "options": {"second_order": roots}}
    whole, run_dir = alone("whole", epochs=2, **options)
    assert whole.accuracy > 0.8
    assert '"root"' in run_dir.rank_trace(0).read_text()
    alone("stopped", epochs=2, stop_after=22, **options)
    alone("stopped", resumes=True)
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole", 1)


def test_a_run_that_has_ended_goes_on_for_more_epochs(alone, tmp_path):
    alone("long", epochs=3, lr_schedule="constant")
    alone("short", epochs=2, lr_schedule="constant")
    with pytest.raises(ValueError, match="epochs is 1, but 2 are over in it: give --epochs 2 or m"):
        alone("short", resumes=True, epochs=1)
    resumed, _ = alone("short", resumes=True, epochs=3)
    assert resumed.epochs == 3
    assert_same_runs(tmp_path / "short", tmp_path / "long", 1)


def test_more_epochs_of_a_schedule_that_ended_at_0_are_told(alone):
    """The rate rises again where it had fallen."""
    alone("run", epochs=1)
    with pytest.warns(UserWarning, match="epochs is 2 instead of 1: lr_schedule cosine"):
        alone("run", resumes=True, epochs=2)


def test_a_run_goes_on_with_other_threads_and_another_device(alone):
    alone("run", epochs=1, lr_schedule="constant")
    resumed, _ = alone(
        "run", resumes=True, epochs=2, threads=2, device="auto", lr_schedule="constant"
    )
    assert resumed.epochs == 2


def test_a_checkpoint_is_not_written_through_a_link(alone, tmp_path):
    alone("run", epochs=1, keep_checkpoints=9)
    precious = tmp_path / "precious"
    precious.write_text("of somebody else")
    alone("run", resumes=True, resume_step=7)  # and step 14 is removed
    link = tmp_path / "run" / "checkpoints" / "step-000000014" / "rank-0000.pt"
    shutil.rmtree(link.parent, ignore_errors=True)
    link.parent.mkdir()
    link.symlink_to(precious)
    alone("run", resumes=True, resume_step=7)
    assert precious.read_text() == "of somebody else"
    assert not link.is_symlink()
    assert checkpoint.load(link.parents[1], rank=0, step=14) is not None


def test_a_step_can_be_chosen_and_what_came_after_it_is_removed(alone, tmp_path):
    alone("whole", epochs=1, keep_checkpoints=9)
    alone("again", epochs=1, keep_checkpoints=9)
    alone("again", resumes=True, resume_step=14)
    assert_same_runs(tmp_path / "again", tmp_path / "whole", 1)


def test_resuming_is_refused_with_the_reason(alone, tmp_path):
    alone("run", epochs=1, lr_schedule="constant")
    saved = config_of_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"batch_size is 8, but the run in .* has batch_size=64"):
        reopen(dataclasses.replace(saved, batch_size=8))
    with pytest.raises(ValueError, match="leave --out out, or copy the folder"):
        reopen(dataclasses.replace(saved, out=tmp_path / "other"))
    with pytest.raises(ValueError, match=r"no checkpoint of step 8 .* 21, 23"):
        reopen(dataclasses.replace(saved, resume_step=8))
    with pytest.raises(ValueError, match=r"cannot read .*config.json.*; name the config.json"):
        config_of_run(tmp_path / "nowhere")
    alone("bare", epochs=1, checkpoint_every=None)
    with pytest.raises(ValueError, match=r"no checkpoint in .*bare.*with --checkpoint-every"):
        reopen(config_of_run(tmp_path / "bare"))
    with pytest.raises(ValueError, match="resume_step is 3, but no run is resumed"):
        TrainConfig(resume_step=3)
    # Epochs, and what changes no figure, may be others.
    reopen(dataclasses.replace(saved, epochs=2, log_every=5, keep_checkpoints=4))


def test_a_damaged_checkpoint_is_refused_and_older_ones_are_named(alone, tmp_path):
    _, run_dir = alone("run", epochs=1)
    newest = run_dir.checkpoints / "step-000000023" / "rank-0000.pt"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1])
    ended(run_dir)
    before = files_of(run_dir)
    with pytest.raises(ValueError, match=r"step 23 cannot be resumed: .*rank-0000.*21"):
        alone("run", resumes=True, log_every=3)
    run_dir.remove_partial()  # as whoever starts it does
    assert files_of(run_dir) == before, "what it had come to, its options and its metrics stay"
    resumed, _ = alone("run", resumes=True, resume_step=21)
    assert resumed.steps == 23


def test_a_newer_checkpoint_is_not_passed_over_for_its_manifest(alone):
    _, run_dir = alone("run", epochs=1)
    manifest = run_dir.checkpoints / "step-000000023" / "rank-0000.json"
    manifest.write_text("")
    ended(run_dir)
    before = files_of(run_dir)
    reason = r"step-000000023/rank-0000.json is damaged.* 21.*--resume-step"
    with pytest.raises(ValueError, match=reason):
        alone("run", resumes=True)
    assert files_of(run_dir) == before
    resumed, _ = alone("run", resumes=True, resume_step=21)
    assert resumed.steps == 23


@pytest.mark.parametrize("resume_step", [None, 23])
def test_a_damaged_checkpoint_is_not_taken_for_none(alone, resume_step):
    _, run_dir = alone("run", epochs=1, keep_checkpoints=1 if resume_step is None else 2)
    (run_dir.checkpoints / "step-000000023" / "rank-0000.json").write_text("")
    with pytest.raises(ValueError, match=r"step-000000023/rank-0000.json is damaged"):
        alone("run", resumes=True, resume_step=resume_step)


def ended(run_dir):
    """Leaves what an end leaves."""
    run_dir.remove_partial()
    for path in (run_dir.model, run_dir.summary, run_dir.trace, run_dir.path / "report.html"):
        path.write_text(f"{path.name} of the end")
    run_dir.evicted_model(7).write_text("all that it had learned")


def files_of(run_dir):
    return {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}


def test_what_an_end_has_left_goes_when_the_run_goes_on(alone, tmp_path):
    _, run_dir = alone("run", epochs=1, lr_schedule="constant")
    ended(run_dir)
    options = run_dir.config.read_text()
    reopen(dataclasses.replace(config_of_run(tmp_path / "run"), epochs=2))
    assert run_dir.summary.exists()
    assert run_dir.model.exists()
    assert run_dir.config.read_text() == options, "a start that is refused changes no options"
    alone("run", resumes=True, epochs=2)
    assert not any(path.exists() for path in (run_dir.summary, run_dir.model, run_dir.trace))
    assert config_of_run(tmp_path / "run").epochs == 2
    evicted = run_dir.path / "evicted-rank7.safetensors"
    assert evicted.read_text() == "all that it had learned"
    assert run_dir.evicted_model(7).name == "evicted-rank7-2.safetensors"


def test_checkpoints_of_another_run_are_refused(alone, tmp_path):
    _, one = alone("one", epochs=1)
    _, other = alone("other", epochs=1)
    shutil.rmtree(other.checkpoints)
    shutil.copytree(one.checkpoints, other.checkpoints)
    with pytest.raises(ValueError, match=r"no checkpoint in .*other.* is complete"):
        reopen(config_of_run(tmp_path / "other"))
    named = dataclasses.replace(config_of_run(tmp_path / "one"), run_name="other")
    with pytest.raises(ValueError, match=r"run_name is other, but the run in .* has run_name="):
        reopen(named)
    assert TrainConfig.from_file(one.config).run_name is None, "--config begins another run"
    taken = dataclasses.replace(named.resolved(nproc=1, out=one.path), resume_step=23)
    with pytest.raises(ValueError, match=r"checkpoint of step 23 .* is of run "):
        train_alone(taken, one)


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
    last = first + 20
    with after_steps(killed, first, kill_all, before=last), pytest.raises(RunFailedError):
        run(config(killed, **options))
    assert checkpoint.latest(killed / "checkpoints") is not None
    with after_steps(killed, last, press_ctrl_c, before=last + 20):
        run(config_of_run(killed))
    assert len({state_of(killed, rank)["session"]["steps"] for rank in range(2)}) == 1
    run(config_of_run(killed))
    assert_same_runs(killed, tmp_path / "whole", 2)
    models = [load_file(path / "model.safetensors") for path in (killed, tmp_path / "whole")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
