"""Metrics on a disk that is full: no line is there in part, and no run dies of it."""

import errno
import io
import os
from pathlib import Path

import pytest

from support.alone import each_step, events, resume_alone, run_alone

FULL = "[Errno 28] No space left on device"


class Disk:
    """One on which a file of metrics can be of so many bytes."""

    def __init__(self):
        self.room_bytes = 1 << 20

    def open(self, path, mode, buffering):
        disk = self

        class File(io.FileIO):
            def write(self, content):
                took = content[: max(0, disk.room_bytes - self.tell())]
                if not took:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(took)

        return File(path, mode.replace("b", ""))


@pytest.fixture
def disk(monkeypatch):
    disk, opened = Disk(), Path.open

    def open_on_it(path, *arguments, **settings):
        unbuffered = settings.get("buffering") == 0
        return (disk.open if unbuffered else opened)(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", open_on_it)
    return disk


def begin(out, **options):
    return run_alone(out, epochs=1, batch_size=100, log_every=1, **options)


def steps(out):
    return [event["step"] for event in events(out)]


def test_what_a_full_disk_does_not_take_is_left_out_whole(disk, tmp_path):
    def fill(step):
        """Has no room for the lines of the third step and the fourth, but for a part of one."""
        size = (tmp_path / "metrics-rank0.jsonl").stat().st_size
        disk.room_bytes = size + 10 if step in (3, 4) else 1 << 20

    with each_step(fill), pytest.warns(UserWarning, match="an event is left out of the metrics"):
        summary = begin(tmp_path).summary
    assert steps(tmp_path) == [1, 2, *range(5, 16)]
    assert summary["notes"] == [f"rank 0: events that the metrics lack: 2, because of {FULL}"]


def test_a_rank_comes_to_its_end_on_a_full_disk(disk, tmp_path):
    disk.room_bytes = 0
    with pytest.warns(UserWarning, match="an event is left out of the metrics"):
        summary = begin(tmp_path).summary
    assert summary["steps"] == 15
    assert (tmp_path / "metrics-rank0.jsonl").read_text() == ""
    assert (tmp_path / "model.safetensors").exists()


def test_a_run_that_is_resumed_writes_each_step_once_though_the_file_lost_its_end(tmp_path):
    """A machine that broke down may have lost it, and left a part of a line."""
    for cut_bytes, left_out in ((0, []), (None, [5])):
        begin(tmp_path, checkpoint_every=5, keep_checkpoints=9)
        path = tmp_path / "metrics-rank0.jsonl"
        if cut_bytes is None:
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[:5])[:-3])
        resume_alone(tmp_path, resume_step=5)
        assert steps(tmp_path) == [step for step in range(1, 16) if step not in left_out]
