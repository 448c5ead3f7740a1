"""In the background: a copy at once, a write at a time, and no error that ends training."""

import errno
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

from gossipgrad import checkpoint
from gossipgrad.checkpoint import _files, _save
from support.trees import assert_same, replica
from support.waiting import HANG_SECONDS, until


class Disk:
    """One that can be held up, or refuse to write."""

    def __init__(self, monkeypatch):
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error = None
        self._fsync = os.fsync
        monkeypatch.setattr(_files.os, "fsync", self.fsync)

    def fsync(self, handle):
        assert self.goes_on.wait(HANG_SECONDS)
        if self.error is not None:
            raise self.error
        self._fsync(handle)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.goes_on.set()


def saver_in(directory, **settings):
    return checkpoint.Saver(directory, rank=0, world_size=1, **settings)


def test_what_is_written_is_a_copy_of_the_moment(disk, tmp_path):
    state = replica(1)
    tensors = [state["model"]["w"], torch.arange(6.0).reshape(2, 3).T]
    state["more"] = tensors
    saver = saver_in(tmp_path)
    disk.goes_on.clear()
    assert saver.save(state, step=1)
    state["model"]["w"].zero_()
    tensors[1].zero_()
    state["epoch"] = 7
    disk.goes_on.set()
    assert saver.close()
    found = checkpoint.load(tmp_path, rank=0)
    assert_same(found.pop("more"), [torch.ones(4), torch.arange(6.0).reshape(2, 3).T])
    assert_same(found, replica(1))


def test_memory_is_used_again(tmp_path):
    saver = saver_in(tmp_path)
    state = {"w": torch.zeros(1000), "narrow": torch.zeros(10, dtype=torch.bfloat16)}
    assert saver.stats().buffer_bytes == 0
    places = set()
    for step in range(3):
        state["w"].fill_(step)
        assert saver.save(state, step=step, wait_seconds=HANG_SECONDS)
        places.add(tuple(buffer.data_ptr() for buffer in saver._buffers.values()))
        assert saver.stats().buffer_bytes == 4020
    assert len(places) == 1
    saver.save({"w": torch.zeros(10)}, step=3, wait_seconds=HANG_SECONDS)
    assert saver.stats().buffer_bytes == 40
    assert saver.close()
    assert saver.stats().buffer_bytes == 0
    assert checkpoint.load(tmp_path, rank=0, step=2)["w"].unique().tolist() == [2.0]


def test_copies_that_are_given_are_not_copied_again(tmp_path):
    with saver_in(tmp_path) as saver:
        saver.save(replica(1), step=1, copy=False)
        assert saver.stats().buffer_bytes == 0
    assert_same(checkpoint.load(tmp_path, rank=0), replica(1))


def test_a_slow_disk_holds_nobody_up(disk, tmp_path):
    saver = saver_in(tmp_path)
    disk.goes_on.clear()
    assert saver.save(replica(1), step=1)
    with pytest.warns(UserWarning, match="step 2 is skipped"):
        assert not saver.save(replica(2), step=2)
    assert not saver.save(replica(3), step=3), "without another word"
    assert saver.stats().skipped == 2
    threading.Timer(0.05, disk.goes_on.set).start()
    assert saver.save(replica(4), step=4, wait_seconds=HANG_SECONDS)
    assert saver.close()
    stats = saver.stats()
    assert (stats.saved, stats.skipped, stats.failed, stats.last_step) == (2, 2, 0, 4)
    assert checkpoint.steps(tmp_path) == [1, 4]
    assert_same(checkpoint.load(tmp_path, rank=0), replica(4))
    assert stats.size_bytes == sum(
        path.stat().st_size for path in tmp_path.glob("step-000000004/*/state*")
    )


def test_a_disk_that_is_full_ends_nothing(disk, tmp_path):
    saver = saver_in(tmp_path, keep=1)
    assert saver.save(replica(1), step=1)
    assert saver.wait(HANG_SECONDS)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    assert saver.save(replica(2), step=2)
    with pytest.warns(UserWarning, match="No space left"):
        assert saver.wait(HANG_SECONDS)
    assert saver.error is disk.error
    assert saver.save(replica(3), step=3)
    assert saver.wait(HANG_SECONDS), "told once"
    assert (saver.stats().failed, saver.stats().saved) == (2, 1)
    assert_same(checkpoint.load(tmp_path, rank=0), replica(1))
    assert len(list(tmp_path.rglob("*.*"))) == 3, "what was half-written takes no room"
    disk.error = None
    assert saver.save(replica(4), step=4)
    assert saver.close()
    assert saver.error is None
    assert checkpoint.steps(tmp_path) == [4]


def test_the_end_waits_for_so_long_and_no_longer(disk, tmp_path):
    saver = saver_in(tmp_path)
    assert saver.save(replica(1), step=1)
    assert saver.wait(HANG_SECONDS)
    disk.goes_on.clear()
    assert saver.save(replica(2), step=2)
    with pytest.warns(UserWarning, match="step 2"):
        assert not saver.close(0.01)
    assert isinstance(saver.error, TimeoutError)
    assert saver.stats().failed == 1
    assert checkpoint.steps(tmp_path) == [1]
    with pytest.raises(ValueError, match="closed"):
        saver.save(replica(3), step=3)
    disk.goes_on.set()
    until(lambda: checkpoint.steps(tmp_path) == [1, 2])


def test_what_cannot_be_removed_fails_no_save(tmp_path, monkeypatch):
    """What is committed is saved, whatever becomes of what it replaces; and so is the next."""
    saver = saver_in(tmp_path, keep=1)
    assert saver.save(replica(1), step=1)
    assert saver.wait(HANG_SECONDS)
    stuck = tmp_path / "step-000000001" / "rank-0000" / "state.json"

    def refuses(path, missing_ok=False, unlink=Path.unlink):
        if path == stuck:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuses)
    assert saver.save(replica(2), step=2)
    with pytest.warns(UserWarning, match="state.json: Operation not permitted"):
        assert saver.wait(HANG_SECONDS)
    assert saver.save(replica(3), step=3), "told once"
    assert saver.close()
    stats = saver.stats()
    assert (stats.saved, stats.failed, stats.last_step, saver.error) == (3, 0, 3, None)
    assert checkpoint.steps(tmp_path) == [3]
    with pytest.warns(UserWarning, match="state.json: Operation not permitted"):
        checkpoint.save(tmp_path, replica(4), rank=0, world_size=1, step=4)


def test_nothing_is_removed_before_the_new_one_is_known_to_be_on_the_disk(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, replica(1), rank=0, world_size=1, step=1, keep=1)

    def fails(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(_save, "sync_folder", fails)
    with pytest.warns(UserWarning, match="Input/output error"):
        checkpoint.save(tmp_path, replica(2), rank=0, world_size=1, step=2, keep=1)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_message_goes_where_the_caller_says(disk, tmp_path):
    messages: list[str] = []
    saver = saver_in(tmp_path, tell=messages.append)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    assert saver.save(replica(1), step=1)
    assert not saver.close()
    assert not saver.close(), "again is no error"
    (message,) = messages
    assert "No space left on device" in message


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
    with pytest.raises(ValueError, match="rank -1"):
        checkpoint.Saver(tmp_path, rank=-1, world_size=2)
    joined = checkpoint.Saver(tmp_path, rank=3, world_size=2)
    with pytest.raises(ValueError, match="rank 3"):
        joined.save({}, step=1)


def test_a_step_that_lies_there_is_an_error_of_the_saver(tmp_path):
    checkpoint.save(tmp_path, replica(5), rank=0, world_size=1, step=5)
    saver = saver_in(tmp_path)
    saver.save(replica(3), step=3)
    with pytest.warns(UserWarning, match="rewind"):
        saver.close()


def test_no_memory_for_a_copy_ends_nothing(tmp_path, monkeypatch):
    def none_left(*arguments, **settings):
        raise RuntimeError("not enough memory: you tried to allocate 7 bytes")

    saver = saver_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", none_left)
        with pytest.warns(UserWarning, match="not enough memory"):
            assert not saver.save(replica(1), step=1)
    assert saver.stats().failed == 1
    assert saver.save(replica(2), step=2)
    assert saver.close()


def test_a_saver_that_nobody_closes_leaves_no_thread(tmp_path):
    saver = saver_in(tmp_path)
    saver.save(replica(1), step=1)
    thread, gone = saver._write.thread, weakref.ref(saver)
    assert thread.daemon
    del saver
    gc.collect()
    assert gone() is None
    thread.join(HANG_SECONDS)
    assert_same(checkpoint.load(tmp_path, rank=0), replica(1))


@pytest.mark.gpu
def test_from_a_device(tmp_path):
    weight = torch.randn(1000, 1000, device="cuda")
    wanted = weight.cpu()
    with saver_in(tmp_path) as saver:
        for step in range(3):
            assert saver.save({"w": weight, "t": weight.T}, step=step, wait_seconds=HANG_SECONDS)
            assert saver._buffers["w"].is_pinned()
        weight.zero_()
    assert_same(checkpoint.load(tmp_path, rank=0), {"w": wanted, "t": wanted.T})
