"""Metrics on a disk that is full: no line is there in part, and no run dies of it."""

import errno
import io
import json
import os
from pathlib import Path

import pytest

from gossipgrad.train._loggers import Loggers
from gossipgrad.train._metrics import Metrics
from support.alone import begin_alone, train_alone

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


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_a_full_disk_does_not_take_is_left_out_whole(disk, tmp_path):
    path, logged = tmp_path / "metrics-rank0.jsonl", []

    class Kept:
        def log(self, step, scalars):
            logged.append(scalars)

        def close(self):
            pass

    with Metrics(path, loggers=Loggers({"kept": Kept})) as metrics:
        for step in (1, 2):
            metrics.write("step", step=step)
        disk.room_bytes = path.stat().st_size + 10
        with pytest.warns(UserWarning, match="an event is left out of the metrics"):
            metrics.write("step", step=3)
        metrics.write("step", step=4)  # without another word
        disk.room_bytes += 1 << 20
        metrics.write("step", step=5)
    assert steps(path) == [1, 2, 5]
    assert len(logged) == 5
    assert metrics.notes == [f"events that the metrics lack: 2, because of {FULL}"]


def test_a_run_that_is_resumed_goes_on_behind_what_its_checkpoint_knows(disk, tmp_path):
    path = tmp_path / "metrics-rank0.jsonl"
    with Metrics(path) as metrics:
        metrics.write("step", step=1)
        state = metrics.state(epoch_batches=1)
        metrics.write("step", step=2)
    with Metrics(path, resumed=state) as metrics:
        metrics.write("step", step=20)
        assert metrics.state(epoch_batches=1)["offset"] == path.stat().st_size
    assert steps(path) == [1, 20]
    with Metrics(path, resumed=state | {"offset": 10**6}) as metrics:
        metrics.write("step", step=21)
    assert steps(path) == [1, 20, 21], "behind its end there is nothing to cut off"
    assert metrics.notes == []


def test_the_end_of_a_file_that_a_broken_machine_has_lost_is_cut_off_to_whole_lines(disk, tmp_path):
    path = tmp_path / "metrics-rank0.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2):
            metrics.write("step", step=step)
        state = metrics.state(epoch_batches=1)
    path.write_bytes(path.read_bytes()[:-3])
    with Metrics(path, resumed=state) as metrics:
        metrics.write("step", step=3)
    assert steps(path) == [1, 3]


def test_a_rank_comes_to_its_end_on_a_full_disk(disk, tmp_path):
    disk.room_bytes = 0
    config, run_dir = begin_alone(tmp_path / "run", epochs=1, batch_size=100, trace=0)
    with pytest.warns(UserWarning, match="training goes on, and so do they as soon as there is"):
        result = train_alone(config, run_dir)
    assert result.steps == 15
    assert run_dir.metrics(0).read_text() == ""
    assert run_dir.rank_model(0).exists()
    assert result.notes == (f"events that the metrics lack: 2, because of {FULL}",)
