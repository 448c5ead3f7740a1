"""Runs whose disk is full, or has damaged what was saved."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad import checkpoint
from gossipgrad.train import RunFailedError, config_of_run, run
from support.alone import resume_alone, run_alone
from support.launched import config


def full_disk(monkeypatch, steps):
    """The disk takes no checkpoint of these steps."""
    fsync = os.fsync

    def full(file):
        path = str(Path(f"/proc/self/fd/{file}").readlink())
        if any(f"step-{step:09}" in path for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)


def begin(out):
    return run_alone(out, epochs=1, batch_size=64, checkpoint_every=4, keep_checkpoints=2).summary


def test_a_disk_that_stays_full_costs_no_step_and_no_checkpoint_of_before(
    tmp_path, monkeypatch, capsys
):
    full_disk(monkeypatch, range(12, 100))
    summary = begin(tmp_path)
    assert summary["steps"] == 23
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "could not be" in line]
    assert "No space left on device" in told
    assert "Training continues, and the previous checkpoint stays." in told
    (note,) = summary["notes"]
    # Those of 12, 16, 20 and 23.
    assert "checkpoints that could not be saved: 4, the last one because of [Errno" in note
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8]
    before = load_file(tmp_path / "model.safetensors")
    monkeypatch.undo()
    assert resume_alone(tmp_path).summary["steps"] == 23
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, before[name]), "from step 8 on it is the same run"


@pytest.mark.process
def test_a_file_that_is_damaged_on_one_rank_is_named_and_ends_the_start_on_all(tmp_path):
    run(config(tmp_path, nproc=2, epochs=1, batch_size=64, checkpoint_every=4, trace=0))
    newest = checkpoint.latest(tmp_path / "checkpoints")
    damaged = tmp_path / "checkpoints" / f"step-{newest:09}" / "rank-0001.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(RunFailedError, match=rf"step {newest} cannot be resumed: .*{damaged}"):
        run(config_of_run(tmp_path))
    assert checkpoint.latest(tmp_path / "checkpoints") == newest, "nothing was removed"
