"""A run that lives is neither replaced nor resumed; one that was killed is, whatever it left."""

import errno
import fcntl
import subprocess
import sys
from dataclasses import replace

import pytest

from gossipgrad.train import config_of_run, run
from support.alone import resume_alone, run_alone
from support.launched import after_steps, config

HOLDS_ITS_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(10_000)
"""


@pytest.fixture
def out(tmp_path):
    """The folder of a run with a checkpoint."""
    run_alone(tmp_path, epochs=1, batch_size=100, checkpoint_every=5)
    return tmp_path


@pytest.mark.process
def test_a_run_that_trains_is_neither_replaced_nor_resumed(tmp_path):
    refused = []

    def again():
        for options in (
            config(tmp_path, nproc=1),
            replace(config_of_run(tmp_path), resume=tmp_path),
        ):
            with pytest.raises(ValueError, match=r"the run in .* trains: .* Stop it first"):
                run(options)
            refused.append(options)

    with after_steps(tmp_path, 20, again, before=40):
        outcome = run(config(tmp_path, nproc=2, epochs=2, trace=0))
    assert len(refused) == 2
    assert outcome.summary["steps_per_rank"] == [90, 90], "it had all that it needed"


def test_a_process_that_was_killed_keeps_nobody_out(out):
    command = [sys.executable, "-c", HOLDS_ITS_LOCK, str(out / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holds:
        assert holds.stdout is not None
        assert holds.stdout.readline() == "held\n"
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        for again in (run_alone, resume_alone):
            with pytest.raises(ValueError, match="trains"):
                again(out)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
        holds.kill()
    for again in (resume_alone, run_alone):
        assert again(out, epochs=1).exit_code == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_keeps_nobody_out(out, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, "No locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert resume_alone(out).exit_code == 0
