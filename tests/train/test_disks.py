"""Whole runs of two ranks, as threads, whose disk is full or has damaged what was saved."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gossipgrad import checkpoint
from gossipgrad.checkpoint import _save
from gossipgrad.comm import Group
from gossipgrad.train import TrainConfig, _state, config_of_run
from gossipgrad.train._folder import RunDir, claim
from gossipgrad.train._rank import train_rank
from gossipgrad.train._state import reopen
from gossipgrad.train._tasks import load_job
from support.ranks import run_ranks
from support.waiting import HANG_SECONDS

RANKS = 2
OPTIONS = {"epochs": 2, "batch_size": 64, "trace": 0, "checkpoint_every": 4, "keep_checkpoints": 2}


@pytest.fixture
def play(tmp_path):
    """Trains, or goes on; what each rank came to, or failed of, and what it told.

    However slow the disk is, the checkpoint before is awaited, and none left out.
    """
    patience = pytest.MonkeyPatch()  # a test undoes what it has patched itself
    patience.setattr(_state, "_WRITE_SECONDS", 50.0)
    threads = torch.get_num_threads()

    def trained(config):
        told = [[] for _ in range(RANKS)]

        def main(rank, group):
            try:
                return train_rank(
                    config,
                    load_job(config),
                    RunDir(config.out),
                    rank=rank,
                    world_size=RANKS,
                    stop=threading.Event(),
                    emit=told[rank].append,
                    groups=lambda name: Group(
                        dist.PrefixStore(name, group.store),
                        rank,
                        RANKS,
                        timeout_seconds=HANG_SECONDS,
                    ),
                )
            except ValueError as error:
                return str(error)

        came_to = run_ranks(RANKS, main)
        texts = [[one["text"] for one in own if one["event"] == "checkpoint"] for own in told]
        return came_to, texts

    def begin():
        run_dir = claim(tmp_path / "run", name="", overwrite=True)
        config = TrainConfig(**OPTIONS, run_name="it").resolved(nproc=RANKS, out=run_dir.path)
        config.write(run_dir.config)
        return trained(config)

    def go_on(**options):
        chosen, _ = reopen(dataclasses.replace(config_of_run(tmp_path / "run"), **options))
        return trained(chosen.resolved(nproc=RANKS, out=tmp_path / "run"))

    yield begin, go_on, RunDir(tmp_path / "run")
    torch.set_num_threads(threads)
    patience.undo()


def full_disk(monkeypatch, steps):
    """The disk takes no file of rank 1 at these steps."""
    write = _save.write_whole

    def write_whole(path, content):
        of_step = int(path.parent.name.removeprefix("step-"))
        if path.name == "rank-0001.pt" and of_step in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(_save, "write_whole", write_whole)


def test_a_disk_that_stays_full_costs_no_step_and_no_checkpoint_of_before(play, monkeypatch):
    begin, go_on, run_dir = play
    full_disk(monkeypatch, range(12, 100))
    results, texts = begin()
    assert [(result.steps, result.epochs) for result in results] == [(24, 2)] * RANKS
    assert texts[0] == []
    (told,) = texts[1]
    assert told.startswith("rank 1: a checkpoint could not be saved into")
    assert "No space left on device" in told
    assert "Training continues, and the previous checkpoint stays." in told
    (note,) = [note for note in results[1].notes if "could not be saved" in note]
    # Those of 12, 16, 20 and 24.
    assert note.startswith("checkpoints that could not be saved: 4, the last one because of [Errno")
    assert checkpoint.steps(run_dir.checkpoints) == [4, 8]
    for rank in range(RANKS):
        for step in (4, 8):
            assert checkpoint.load(run_dir.checkpoints, rank=rank, step=step)["session"]
    assert not list(run_dir.checkpoints.glob("step-*[12]*/rank-0001.pt"))

    before = [load_file(run_dir.rank_model(rank)) for rank in range(RANKS)]
    monkeypatch.undo()
    again, texts = go_on()
    assert texts == [[], []]
    assert [result.steps for result in again] == [24] * RANKS
    for rank in range(RANKS):
        for name, value in load_file(run_dir.rank_model(rank)).items():
            assert torch.equal(value, before[rank][name]), "from step 8 on it is the same run"


@pytest.mark.slow
def test_a_disk_that_has_room_again_gets_the_next_checkpoint(play, monkeypatch):
    begin, _, run_dir = play
    full_disk(monkeypatch, range(8, 16))
    results, texts = begin()
    assert [result.steps for result in results] == [24] * RANKS
    assert len(texts[1]) == 1
    assert checkpoint.steps(run_dir.checkpoints) == [20, 24]
    assert checkpoint.load(run_dir.checkpoints, rank=1)["loop"]["metrics"]["steps"] == 24


def test_a_file_that_is_damaged_on_one_rank_is_named_on_all(play):
    """Nobody waits for the rank that cannot read its own."""
    begin, go_on, run_dir = play
    begin()
    newest = run_dir.checkpoints / "step-000000024" / "rank-0001.pt"
    whole = bytearray(newest.read_bytes())
    whole[-1] ^= 1
    newest.write_bytes(whole)
    failed, _ = go_on()
    for why in failed:
        assert why.startswith("the checkpoint of step 24 cannot be resumed: "), why
        assert str(newest) in why
    assert checkpoint.steps(run_dir.checkpoints) == [20, 24], "nothing was removed"
    results, _ = go_on(resume_step=20)
    assert [result.steps for result in results] == [24] * RANKS


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("kilobytes", [400, 600])
def test_a_disk_that_fills_up_takes_the_trace_and_never_the_model(kilobytes, tmp_path):
    out = tmp_path / "disk"
    out.mkdir()
    size = f"size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(out)], check=True)
    try:
        command = [sys.executable, "-m", "gossipgrad", "train", "--nproc", "3", "--epochs", "10"]
        found = subprocess.run(
            [*command, "--quiet", "--out", str(out / "run")], timeout=HANG_SECONDS
        )
        assert found.returncode == 0
        assert load_file(out / "run" / "model.safetensors")
        assert json.loads((out / "run" / "summary.json").read_text())["accuracy"] > 0.7
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)
