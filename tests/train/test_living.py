"""A run that lives is neither replaced nor resumed; one that was killed is, whatever it left."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from gossipgrad import checkpoint
from gossipgrad.train import (
    Outcome,
    RunFailedError,
    TrainConfig,
    World,
    _ending,
    _lock,
    _run,
    _worker,
    config_of_run,
    run,
)
from gossipgrad.train._invitation import Invitation
from gossipgrad.train._layout import RunDir
from gossipgrad.train._lock import hold_lock

HOLDS_ITS_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """The folder of a run with a checkpoint."""
    monkeypatch.setattr(_lock, "_PATIENCE_SECONDS", 0.1)
    made = RunDir(tmp_path)
    made.partial.mkdir()
    config(made).resolved(nproc=2, out=made.path).write(made.config, {})
    checkpoint.save(made.checkpoints, {}, rank=0, world_size=1, step=10, run="it")
    return made


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.2", 0)) as made:
        yield made


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


def refuses(run_dir, **options):
    """Why it is refused; None if it is not."""
    try:
        with hold_lock(run_dir, first=True, **options):
            return None
    except ValueError as error:
        return str(error).replace(str(run_dir.path), "RUN")


TAKEN = (
    "the run in RUN trains: a process that takes part in it holds RUN/.lock. Stop it first; if it "
    "was on a machine that is gone, remove that file."
)


@pytest.mark.parametrize("again", [replacing, going_on])
def test_a_run_that_trains_is_neither_replaced_nor_resumed(again, run_dir, monkeypatch):
    before = []

    def launch(*_, **__):
        before.append(content(run_dir))
        with pytest.raises(ValueError, match=r"the run in .* trains: a process .* Stop it first"):
            run(again(run_dir))
        assert content(run_dir) == before[-1], "it has all that it needs"
        raise RunFailedError("enough")

    monkeypatch.setattr(_run, "launch", launch)
    with pytest.raises(RunFailedError, match="enough"):
        run(again(run_dir))
    assert len(before) == 1
    assert not run_dir.lock.exists()


def test_nor_is_one_of_a_given_world_any_of_whose_ranks_lives(run_dir, monkeypatch):
    left, told = threading.Event(), []

    def take_part_in_turn(worker, *_):
        if worker._world.rank == 1:
            assert left.wait(30)
            told.append(refuses(run_dir))
        return Outcome(exit_code=0)

    def rank(number):
        world = World(rank=number, world_size=2, launcher="torchrun")
        _worker.run_in_world(config(run_dir, overwrite=True), world)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(_worker._Worker, "run", take_part_in_turn)
    store = _worker.open_store(0, 2)
    monkeypatch.setattr(_worker, "open_store", lambda *_: store)
    other = threading.Thread(target=rank, args=(1,))
    other.start()
    opener = threading.Thread(target=rank, args=(0,))
    opener.start()
    opener.join(60)
    left.set()
    other.join(60)
    assert told == [TAKEN]
    assert refuses(run_dir) is None


def test_one_that_takes_over_from_an_opener_that_stands_still_is_not_kept_out(run_dir):
    def opens(rank, mailbox, *, again):
        world = World(rank=rank, world_size=2, launcher="torchrun")
        held, worker = ExitStack(), _worker._Worker(world)
        worker.mailbox = mailbox
        worker.open(replacing(run_dir), held, again=again, show_config=False)
        return held

    ours, theirs = dist.HashStore(), dist.HashStore()
    stands_still = opens(0, ours, again=False)
    with stands_still, opens(1, ours, again=True), pytest.raises(ValueError, match="a process"):
        opens(1, theirs, again=True)


def test_a_process_that_was_killed_keeps_nobody_out(run_dir):
    command = [sys.executable, "-c", HOLDS_ITS_LOCK, str(run_dir.lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holds:
        assert holds.stdout is not None
        assert holds.stdout.readline() == "held\n"
        assert refuses(run_dir) == TAKEN
        holds.kill()
    assert run_dir.lock.exists()
    assert refuses(run_dir) is None
    assert not run_dir.lock.exists()


def test_the_last_to_leave_removes_the_lock(run_dir):
    with ExitStack() as first, ExitStack() as last:
        first.enter_context(hold_lock(run_dir, first=True))
        last.enter_context(hold_lock(run_dir))
        first.close()
        assert run_dir.lock.exists()
        assert refuses(run_dir) == TAKEN
        last.close()
        assert not run_dir.lock.exists()


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(run_dir, monkeypatch):
    opened = []

    def flock(file, how):
        if not opened:
            opened.append(os.fstat(file.fileno()).st_ino)
            run_dir.lock.unlink()
        lock(file, how)

    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_lock(run_dir, first=True):
        assert run_dir.lock.exists()
        assert refuses(run_dir) == TAKEN


def invite(run_dir, host, port):
    Invitation(address="{}", refusal=None, store=(host, port), data="").write(run_dir)


def test_a_run_whose_store_answers_on_another_machine_lives(run_dir, listener):
    host, port = listener.getsockname()
    invite(run_dir, host, port)
    assert refuses(run_dir) == (
        f"the run in RUN trains: its store answers at {host}:{port}. Stop it first; if it is "
        "another program that listens there, remove RUN/invitation.json."
    )
    assert refuses(run_dir, own_store=(host, port)) is None, "torchrun has started it anew"
    listener.close()
    assert refuses(run_dir) is None
    run_dir.invitation.write_text("of something else")
    assert refuses(run_dir) is None


def test_on_one_machine_the_lock_tells_all_where_there_are_locks(run_dir, monkeypatch):
    """The port of a run that was killed may be another program's by now."""

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with socket.create_server(("127.0.0.1", 0)) as another:
        invite(run_dir, *another.getsockname())
        assert refuses(run_dir) is None
        monkeypatch.setattr(fcntl, "flock", flock)
        told = refuses(run_dir)
        assert told is not None
        assert "its store answers" in told
    with hold_lock(run_dir, first=True):
        assert refuses(run_dir) is None, "nothing tells"


def test_a_rank_that_joined_from_another_machine_and_trains_on_is_seen(run_dir, monkeypatch):
    marker, over = run_dir.rank_joined(5), threading.Event()
    marker.touch()

    def live():
        while not over.wait(0.02):
            os.utime(marker)

    lives = threading.Thread(target=live)
    lives.start()
    told = refuses(run_dir)
    over.set()
    lives.join()
    assert told == (
        "the run in RUN trains: rank 5, which joined it, shows signs of life. Stop it first."
    )
    monkeypatch.setattr(_ending, "_SILENT_SECONDS", 0.3)
    os.utime(marker)
    assert refuses(run_dir) is None, "no other sign came"
