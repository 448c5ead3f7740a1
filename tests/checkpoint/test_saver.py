"""In the background: a copy at once, one write at a time, and no error that ends training."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from gossipgrad import checkpoint
from support.trees import assert_same, replica
from support.waiting import HANG_SECONDS


class Disk:
    """A disk that can be held up, or refuse to write."""

    def __init__(self, monkeypatch):
        self.runs = threading.Event()
        self.runs.set()
        self.error = None
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle):
        assert self.runs.wait(HANG_SECONDS)
        if self.error is not None:
            raise self.error
        self._fsync(handle)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.runs.set()


def saver_in(directory, **settings):
    return checkpoint.Saver(directory, rank=0, world_size=1, **settings)


def test_what_is_written_is_a_copy_of_the_moment(disk, tmp_path):
    turned = torch.arange(6.0).reshape(2, 3).T
    state = {**replica(1), "more": [turned, turned]}
    saver = saver_in(tmp_path)
    for step in (1, 2):  # the second time into the buffers of the first
        assert saver.wait(HANG_SECONDS)
        disk.runs.clear()
        assert saver.save(state, step=step)
        state["model"]["w"].zero_()
        turned.add_(1)
        disk.runs.set()
    assert saver.close()
    first, second = (checkpoint.load(tmp_path, rank=0, step=step) for step in (1, 2))
    assert_same(first["more"], [torch.arange(6.0).reshape(2, 3).T] * 2)
    assert_same(second["more"], [torch.arange(6.0).reshape(2, 3).T + 1] * 2)
    assert_same(first["model"], replica(1)["model"])
    assert not second["model"]["w"].any()


def test_a_slow_disk_holds_nobody_up(disk, tmp_path):
    saver = saver_in(tmp_path)
    disk.runs.clear()
    assert saver.save(replica(1), step=1)
    with pytest.warns(UserWarning, match="step 2 is skipped"):
        assert not saver.save(replica(2), step=2)
    assert not saver.save(replica(3), step=3), "said once"
    disk.runs.set()
    assert saver.save(replica(4), step=4, wait_seconds=HANG_SECONDS)
    assert saver.close()
    stats = saver.stats()
    assert (stats.saved, stats.skipped, stats.failed) == (2, 2, 0)
    assert checkpoint.steps(tmp_path) == [1, 4]
    assert_same(checkpoint.load(tmp_path, rank=0), replica(4))


def test_a_full_disk_ends_nothing_and_leaves_nothing_half_written(disk, tmp_path):
    messages: list[str] = []
    saver = saver_in(tmp_path, keep=1, tell=messages.append)
    assert saver.save(replica(1), step=1)
    assert saver.wait(HANG_SECONDS)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    for step in (2, 3):
        assert saver.save(replica(step), step=step)
        assert saver.wait(HANG_SECONDS)
        assert saver.error is disk.error
    (message,) = messages
    assert "No space left" in message
    assert (saver.stats().failed, saver.stats().saved) == (2, 1)
    assert_same(checkpoint.load(tmp_path, rank=0), replica(1))
    assert len(list(tmp_path.rglob("*.*"))) == 2
    disk.error = None
    assert saver.save(replica(4), step=4)
    assert saver.close()
    assert saver.error is None
    assert checkpoint.steps(tmp_path) == [4]


def test_close_waits_for_so_long_and_no_longer(disk, tmp_path):
    saver = saver_in(tmp_path)
    disk.runs.clear()
    assert saver.save(replica(1), step=1)
    with pytest.warns(UserWarning, match="step 1"):
        assert not saver.close(0.01)
    assert isinstance(saver.error, TimeoutError)
    assert saver.stats().failed == 1
    with pytest.raises(ValueError, match="closed"):
        saver.save(replica(3), step=3)


def test_an_old_file_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch):
    saver = saver_in(tmp_path, keep=1)
    assert saver.save(replica(1), step=1)
    assert saver.wait(HANG_SECONDS)
    stuck = tmp_path / "step-000000001" / "rank-0000.pt"

    def refuses(path, missing_ok=False, unlink=Path.unlink):
        if path == stuck:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuses)
    for step in (2, 3):
        assert saver.save(replica(step), step=step)
        if step == 2:
            with pytest.warns(UserWarning, match="Operation not permitted"):
                assert saver.wait(HANG_SECONDS)
        assert saver.wait(HANG_SECONDS)
    assert saver.close()
    assert (saver.stats().saved, saver.error) == (3, None)
    assert checkpoint.latest(tmp_path) == 3


def test_no_memory_for_a_copy_ends_nothing(tmp_path, monkeypatch):
    def none_left(*arguments, **settings):
        raise RuntimeError("not enough memory: you tried to allocate 7 bytes")

    saver = saver_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", none_left)
        with pytest.warns(UserWarning, match="not enough memory"):
            assert not saver.save(replica(1), step=1)
    assert saver.save(replica(2), step=2)
    assert saver.close()


def test_mistakes_are_refused_at_once(tmp_path):
    with saver_in(tmp_path) as saver:
        for state, settings in [
            ({"x": {1}}, {"step": 1}),
            ({}, {"step": -1}),
            ({}, {"step": 1, "wait_seconds": -1.0}),
        ]:
            with pytest.raises(ValueError, match=r"set|-1"):
                saver.save(state, **settings)
    with pytest.raises(ValueError, match="keep"):
        saver_in(tmp_path, keep=0)
    checkpoint.save(tmp_path, {}, rank=0, world_size=1, step=5, run="mine")
    with pytest.raises(ValueError, match="'mine'"):
        saver_in(tmp_path, run="other")
    saver = saver_in(tmp_path, run="mine")
    saver.save({}, step=3)
    with pytest.warns(UserWarning, match="rewind"):
        saver.close()


@pytest.mark.gpu
def test_from_a_device(tmp_path):
    weight = torch.randn(1000, 1000, device="cuda")
    wanted = weight.cpu()
    with saver_in(tmp_path) as saver:
        for step in range(3):
            assert saver.save({"w": weight, "t": weight.T}, step=step, wait_seconds=HANG_SECONDS)
        weight.zero_()
    assert_same(checkpoint.load(tmp_path, rank=0), {"w": wanted, "t": wanted.T})
