"""A run that lives is neither replaced nor resumed; one that was killed is, whatever it left."""

import errno
import fcntl
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from gossipgrad import checkpoint
from gossipgrad.train import (
    RunFailedError,
    TrainConfig,
    World,
    _folder,
    _run,
    _worker,
    config_of_run,
    run,
)
from gossipgrad.train._folder import RunDir, held, hold_lock, is_held
from support.waiting import HANG_SECONDS

HOLDS_ITS_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(10_000)
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """The folder of a run with a checkpoint."""
    monkeypatch.setattr(_folder, "_PATIENCE_SECONDS", 0.1)
    made = RunDir(tmp_path)
    made.partial.mkdir()
    config(made).resolved(nproc=2, out=made.path).write(made.config)
    checkpoint.save(made.checkpoints, {}, rank=0, world_size=1, step=10, run="it")
    return made


def config(run_dir, **options):
    return TrainConfig(
        run_name="it", nproc=2, out=run_dir.path, checkpoint_every=5, quiet=True, **options
    )


def replacing(run_dir):
    return config(run_dir, overwrite=True)


def going_on(run_dir):
    return config_of_run(run_dir.path)


def content(run_dir):
    return {str(path): path.stat().st_mtime_ns for path in run_dir.path.rglob("*")}


def is_refused(run_dir):
    try:
        with hold_lock(run_dir, first=True):
            return False
    except ValueError:
        return True


@pytest.mark.parametrize("again", [replacing, going_on])
def test_a_run_that_trains_is_neither_replaced_nor_resumed(again, run_dir, monkeypatch):
    def launch(*_, **__):
        before = content(run_dir)
        with pytest.raises(ValueError, match=r"the run in .* trains: a process .* Stop it first"):
            run(again(run_dir))
        assert content(run_dir) == before, "it has all that it needs"
        raise RunFailedError("enough")

    monkeypatch.setattr(_run, "launch", launch)
    with pytest.raises(RunFailedError, match="enough"):
        run(again(run_dir))
    assert not is_refused(run_dir)


def test_nor_is_one_of_a_given_world_any_of_whose_ranks_lives(run_dir, monkeypatch):
    """Rank 0 ends before the other."""
    has_begun, has_ended = threading.Event(), threading.Event()
    refused, store = [], dist.HashStore()

    def train(config, job, run_dir, *, rank, **_):
        assert rank or has_begun.wait(HANG_SECONDS)
        if rank == 1:
            has_begun.set()
            assert has_ended.wait(HANG_SECONDS)
            refused.append(is_refused(run_dir))
        raise RunFailedError("enough")

    def take_part(rank):
        world = World(rank=rank, world_size=2, launcher="torchrun")
        with pytest.raises(RunFailedError, match="enough"):
            _worker.run_in_world(config(run_dir, overwrite=True), world)

    monkeypatch.setattr(_worker, "open_store", lambda *_: store)
    monkeypatch.setattr(_worker, "train_rank", train)
    ranks = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(HANG_SECONDS)
    has_ended.set()
    ranks[1].join(HANG_SECONDS)
    assert refused == [True]
    assert not is_refused(run_dir)


def test_a_process_that_was_killed_keeps_nobody_out(run_dir):
    command = [sys.executable, "-c", HOLDS_ITS_LOCK, str(run_dir.lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holds:
        assert holds.stdout is not None
        assert holds.stdout.readline() == "held\n"
        assert is_refused(run_dir)
        holds.kill()
    assert not is_refused(run_dir)


def test_all_who_take_part_share_it(run_dir):
    with ExitStack() as first, ExitStack() as last:
        first.enter_context(hold_lock(run_dir, first=True))
        last.enter_context(hold_lock(run_dir))
        first.close()
        assert is_refused(run_dir)
        last.close()
        assert not is_refused(run_dir)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_keeps_nobody_out(run_dir, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, "No locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_lock(run_dir, first=True):
        assert not is_refused(run_dir)


def test_a_rank_that_begins_is_never_seen_as_a_dead_one(tmp_path, monkeypatch):
    path, lock, seen = tmp_path / "lives", fcntl.flock, []

    def looked_at_first(file, how):
        if how & fcntl.LOCK_EX:
            seen.append(is_held(path, otherwise=None))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", looked_at_first)
    with held(path):
        assert is_held(path, otherwise=False)
    assert seen == [None], "there is no file yet"
    assert is_held(path, otherwise=True) is False
