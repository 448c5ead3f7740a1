"""Whatever a kill or a full disk leaves, the checkpoint before is whole."""

import os
import resource
import shutil
import signal
import threading
import warnings
from itertools import count

import pytest

from gossipgrad import checkpoint
from support.processes import run_processes
from support.trees import assert_same, replica
from support.waiting import HANG_SECONDS


def instants(directory, monkeypatch, act):
    """Copies of a directory as it was before each thing that `act()` did to it."""
    copies, busy = [], []

    def spied(patch, name):
        original = getattr(os, name)

        def called(*arguments, **settings):
            if not busy:
                busy.append(name)
                copies.append(directory.with_name(f"instant-{len(copies)}"))
                shutil.copytree(directory, copies[-1])
                busy.pop()
            return original(*arguments, **settings)

        patch.setattr(os, name, called)

    with monkeypatch.context() as patch:
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            spied(patch, name)
        act()
    return copies


def test_killed_at_any_instant_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Every state of the directory that a kill can leave, with uncommitted files torn as well."""
    directory = tmp_path / "there"

    def save(step, where=directory):
        checkpoint.save(where, replica(step), rank=0, world_size=1, step=step, keep=1)

    save(1)
    save(2)
    copies = instants(directory, monkeypatch, lambda: save(3))
    assert len(copies) > 10
    for copy in copies:
        for torn in (False, True):
            if torn:
                tear(copy)
            found = checkpoint.load(copy, rank=0)
            assert found["epoch"] in (2, 3)
            assert_same(found, replica(found["epoch"]))
        save(4, copy)
        assert checkpoint.steps(copy) == [4]
        assert sorted(path.name for path in copy.rglob("*")) == [
            *("rank-0000.json", "rank-0000.pt", "step-000000004"),
        ]


def tear(directory):
    for path in directory.glob("step-*/rank-*.p*"):
        if not path.with_name("rank-0000.json").exists():
            os.truncate(path, path.stat().st_size // 2)


def save_until_killed(rank, store, directory):
    """Saves as fast as it can, and is killed after some milliseconds that nobody knows before."""
    checkpoint.save(directory, replica(1, 100_000), rank=rank, world_size=3, step=1)
    seconds = int.from_bytes(os.urandom(2)) / 2**16 * 0.2
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for step in count(2):
        state = replica(step, 100_000)
        checkpoint.save(directory, state, rank=rank, world_size=3, step=step, keep=2)


@pytest.mark.process
def test_processes_killed_while_they_save(tmp_path):
    ranks = 3
    run_processes(
        ranks, save_until_killed, str(tmp_path), grouped=False, may_die=tuple(range(ranks))
    )
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    for rank in range(ranks):
        assert_same(checkpoint.load(tmp_path, rank=rank), replica(newest, 100_000))
        checkpoint.rewind(tmp_path, rank=rank, step=newest)
    for step in (newest + 1, newest + 2):
        for rank in reversed(range(ranks)):
            checkpoint.save(tmp_path, {}, rank=rank, world_size=ranks, step=step, keep=1)
    assert len(list(tmp_path.rglob("*.*"))) == 2 * ranks, "what was half-written is gone"


def on_a_disk_that_is_full(rank, store, directory):
    """The kernel itself refuses to write on: a limit on the size of files."""
    checkpoint.save(directory, replica(1, 50_000), rank=0, world_size=1, step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoint.save(directory, replica(2, 50_000), rank=0, world_size=1, step=2)
    except OSError as error:
        refused = error.strerror
    with (
        warnings.catch_warnings(record=True) as warned,
        checkpoint.Saver(directory, rank=0, world_size=1) as saver,
    ):
        taken = saver.save(replica(3, 50_000), step=3)
        done, error = saver.wait(HANG_SECONDS), type(saver.error)
        small = saver.save(replica(4), step=4)
        small = small and saver.wait(HANG_SECONDS) and saver.error is None
    return refused, taken, done, error, small, saver.stats().failed, str(warned[0].message)


@pytest.mark.process
def test_a_disk_that_is_full_leaves_what_was_there(tmp_path):
    (answer,) = run_processes(1, on_a_disk_that_is_full, str(tmp_path), grouped=False)
    *found, warned = answer
    assert found == ["File too large", True, True, OSError, True, 1]
    assert warned.startswith("a checkpoint could not be saved into")
    assert checkpoint.steps(tmp_path) == [1, 4]
    assert_same(checkpoint.load(tmp_path, rank=0, step=1), replica(1, 50_000))
    assert len(list(tmp_path.rglob("*.*"))) == 4, "nothing half-written takes room"
