"""A run that is cut short and resumed comes to what it would have, bit for bit."""

import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossipgrad import checkpoint
from gossipgrad.train import Job, RunFailedError, TrainConfig, config_of_run, run
from support.alone import each_step, resume_alone, run_alone, stopping_after
from support.jobs import name_job
from support.launched import after_steps, config, press_ctrl_c, workers
from support.resumed_runs import assert_same_runs, state_of


def begin(out, **options):
    usual = {"log_every": 1, "batch_size": 64, "checkpoint_every": 7, "epochs": 1}
    return run_alone(out, **usual | options)


class Drawing(torch.utils.data.Dataset):
    """Samples that draw, as augmentations do, from the generators of torch and numpy."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        noise = torch.rand(4) + np.random.rand()  # noqa: NPY002
        return noise, index % 3


def drawing_job():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    test = torch.utils.data.TensorDataset(torch.rand(60, 4), torch.arange(60) % 3)
    return Job(model=model, train=Drawing(), test=test, loss=nn.functional.cross_entropy)


def test_a_run_that_was_stopped_continues_bit_for_bit_with_its_random_numbers(
    tmp_path, monkeypatch
):
    job = name_job(monkeypatch, drawing_job)
    whole = begin(tmp_path / "whole", epochs=3, job=job).summary
    with stopping_after(12):
        stopped = begin(tmp_path / "stopped", epochs=3, job=job)
    assert stopped.exit_code == 130
    assert 11 <= stopped.summary["steps"] < whole["steps"]
    assert checkpoint.steps(tmp_path / "stopped" / "checkpoints")[-1] == stopped.summary["steps"]
    resumed = resume_alone(tmp_path / "stopped").summary
    assert (resumed["steps"], resumed["accuracy"]) == (30, whole["accuracy"])
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole", 1)


def test_a_second_order_run_continues_bit_for_bit_with_roots_on_their_way(tmp_path):
    roots = {"refresh_every": 4, "refresh_delay": 3, "max_dim": 64}
    options = {"optimizer": "soap", "lr": 3e-3, "trace": 40, "epochs": 2}
    options["options"] = {"second_order": roots}
    whole = begin(tmp_path / "whole", **options)
    assert whole.summary["accuracy"] > 0.8
    assert '"root"' in (tmp_path / "whole" / "trace.json").read_text()
    with stopping_after(22):
        begin(tmp_path / "stopped", **options)
    resume_alone(tmp_path / "stopped")
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole", 1)


def test_a_run_that_has_ended_continues_for_more_epochs(tmp_path):
    begin(tmp_path / "long", epochs=3, lr_schedule="constant")
    begin(tmp_path / "short", epochs=2, lr_schedule="constant")
    with pytest.raises(RunFailedError, match="epochs is 1, but 2 are over in it: give --epochs 2"):
        resume_alone(tmp_path / "short", epochs=1)
    assert resume_alone(tmp_path / "short", epochs=3).summary["epochs"] == 3
    assert_same_runs(tmp_path / "short", tmp_path / "long", 1)


def test_more_epochs_of_a_schedule_that_ended_at_0_warn(tmp_path):
    """The rate rises again where it had fallen; threads and the device may be others."""
    begin(tmp_path)
    with pytest.warns(UserWarning, match="epochs is 2 instead of 1: lr_schedule cosine"):
        resume_alone(tmp_path, epochs=2, threads=2, device="auto")


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    begin(tmp_path / "run", keep_checkpoints=9)
    precious = tmp_path / "precious"
    precious.write_text("of somebody else")
    resume_alone(tmp_path / "run", resume_step=7)  # and step 14 is removed
    link = tmp_path / "run" / "checkpoints" / "step-000000014" / "rank-0000.pt"
    shutil.rmtree(link.parent, ignore_errors=True)
    link.parent.mkdir()
    link.symlink_to(precious)
    resume_alone(tmp_path / "run", resume_step=7)
    assert precious.read_text() == "of somebody else"
    assert not link.is_symlink()
    assert checkpoint.load(link.parents[1], rank=0, step=14) is not None


def test_a_step_can_be_chosen_and_what_came_after_it_is_removed(tmp_path):
    begin(tmp_path / "whole", keep_checkpoints=9)
    begin(tmp_path / "again", keep_checkpoints=9)
    resume_alone(tmp_path / "again", resume_step=14)
    assert_same_runs(tmp_path / "again", tmp_path / "whole", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8}, r"batch_size is 8, but the run in .* has batch_size=64"),
        ({"out": "elsewhere"}, "leave --out out, or copy the folder"),
        ({"resume_step": 8}, r"no checkpoint of step 8 .* 21, 23"),
        ({"run_name": "other"}, r"run_name is other, but the run in .* has run_name="),
    ],
)
def test_resuming_is_refused_with_the_reason(tmp_path, changes, message):
    begin(tmp_path)
    with pytest.raises(ValueError, match=message):
        resume_alone(tmp_path, **changes)


def test_what_cannot_be_resumed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*config.json.*; name the config.json"):
        config_of_run(tmp_path / "nowhere")
    begin(tmp_path / "bare", checkpoint_every=None)
    with pytest.raises(ValueError, match=r"no checkpoint in .*bare.*with --checkpoint-every"):
        resume_alone(tmp_path / "bare")
    with pytest.raises(ValueError, match="resume_step is 3, but no run is resumed"):
        TrainConfig(resume_step=3)


def files_of(out):
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "error"), [("rank-0000.pt", RunFailedError), ("rank-0000.json", ValueError)]
)
def test_a_damaged_checkpoint_is_refused_by_its_name(tmp_path, name, error):
    begin(tmp_path)
    damaged = tmp_path / "checkpoints" / "step-000000023" / name
    damaged.write_bytes(damaged.read_bytes()[:-5])
    before = files_of(tmp_path)
    with pytest.raises(error, match=rf"step-000000023/{name}"):
        resume_alone(tmp_path, log_every=3)
    assert before.items() <= files_of(tmp_path).items(), "its options, metrics and model stay"
    assert resume_alone(tmp_path, resume_step=21).summary["steps"] == 23


@pytest.mark.parametrize("resume_step", [None, 23])
def test_a_damaged_checkpoint_is_not_taken_for_none(tmp_path, resume_step):
    begin(tmp_path, keep_checkpoints=1 if resume_step is None else 2)
    (tmp_path / "checkpoints" / "step-000000023" / "rank-0000.json").write_text("")
    with pytest.raises(ValueError, match=r"step-000000023/rank-0000.json is damaged"):
        resume_alone(tmp_path, resume_step=resume_step)


def test_what_an_end_has_left_goes_when_the_run_continues(tmp_path):
    begin(tmp_path, lr_schedule="constant")
    (tmp_path / "evicted-rank7.safetensors").write_text("all that it had learned")
    names = ("summary.json", "model.safetensors", "report.html")
    assert all((tmp_path / name).exists() for name in names)
    seen = []
    with each_step(lambda step: seen.append(any((tmp_path / name).exists() for name in names))):
        resume_alone(tmp_path, epochs=2)
    assert len(seen) == 23
    assert not any(seen)
    assert config_of_run(tmp_path).epochs == 2
    assert (tmp_path / "evicted-rank7.safetensors").read_text() == "all that it had learned"


def test_checkpoints_of_another_run_are_refused(tmp_path):
    begin(tmp_path / "one")
    begin(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "other" / "checkpoints")
    with pytest.raises(ValueError, match=r"no checkpoint in .*other.* is complete"):
        resume_alone(tmp_path / "other")
    named = TrainConfig.from_file(tmp_path / "one" / "config.json").run_name
    assert named is None, "--config begins another run"


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
