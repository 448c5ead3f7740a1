"""True processes that are killed or stopped in a run, and what is left of it."""

import os
import signal

import pytest
from safetensors.torch import load_file

from gossipgrad.train import GossipConfig, RunFailedError, run
from support import launched
from support.agents import run_torchrun
from support.held_workers import held_at, struck_at_start
from support.launched import after_steps, kill, pause, stop, wait_for_more, when, workers
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process


def config(out, lost_after_seconds=60.0, **options):
    """The end of a killed worker's links is noticed at once; only a stopped one is waited for."""
    gossip, seconds = {"gossip": GossipConfig(topology="matching")}, lost_after_seconds
    return launched.config(out, trace=0, options=gossip, lost_after_seconds=seconds, **options)


@pytest.mark.slow
def test_half_of_the_workers_are_killed_one_is_stopped_and_goes_on(tmp_path, capfd):
    """Of five two are killed at once; one is stopped, given up, and continued."""

    def strike():
        with pause(4):
            for rank in (0, 3):
                kill(rank)()
            go_on()
            # One evaluation may have been under way; one that began later is without rank 4.
            wait_for_more(tmp_path, 1, "epoch", 2)

    with held_at(40) as go_on, after_steps(tmp_path, 20, strike):
        outcome = run(config(tmp_path, nproc=5, epochs=10, lost_after_seconds=15.0))
    summary = outcome.summary
    assert summary["lost_ranks"] == [0, 3, 4]
    assert "was taken for dead by rank" in summary["lost_because"]["4"]
    assert summary["lost_because"]["0"].startswith("was killed by SIGKILL")
    assert summary["model_is_consensus"]
    assert summary["accuracy"] > 0.9
    own = load_file(tmp_path / "evicted-rank4.safetensors")
    assert own.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert "rank 4 failed: rank 4 was taken for dead by" in capfd.readouterr().err
    assert not workers()


def test_when_the_rank_that_writes_the_results_dies_over_it_the_next_one_does(tmp_path):
    """It reads how far a lost rank came: here from a pipe, behind which it waits."""
    metrics, aside = tmp_path / "metrics-rank2.jsonl", tmp_path / "aside.txt"

    def strike():
        kill(2)()
        metrics.rename(aside)
        os.mkfifo(metrics)
        go_on()
        until(lambda: opened.extend(read_by_somebody(metrics)) or opened)
        kill(0)()
        aside.replace(metrics)
        os.close(opened[0])

    opened = []
    with held_at(40) as go_on, when(lambda: launched.count(tmp_path, 2) > 20, strike):
        outcome = run(config(tmp_path, nproc=3, epochs=2))
    assert opened, "rank 0 was at it"
    assert outcome.exit_code == 0
    assert outcome.summary["lost_ranks"] == [2]
    assert 20 < outcome.summary["losses"]["2"]["step"] <= 41
    assert None not in outcome.summary["steps_per_rank"][:2], "what rank 0 has handed in counts"
    assert load_file(tmp_path / "model.safetensors")
    assert not (tmp_path / "partial").exists()


def read_by_somebody(pipe):
    """The pipe, open for writing, as soon as another process reads from it."""
    try:
        return [os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError:
        return []


@pytest.mark.slow
def test_a_worker_that_stays_stopped_does_not_keep_the_run(tmp_path):
    with after_steps(tmp_path, 20, stop(0), before=40):
        outcome = run(config(tmp_path, nproc=2, epochs=4, lost_after_seconds=15.0))
    assert outcome.exit_code == 0
    assert outcome.summary["lost_ranks"] == [0]
    assert outcome.summary["model_from_rank"] == 1
    assert not workers()


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "1.* start again", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_lost_at_start_up_ends_the_start(tmp_path, number, what):
    """Also when it is stopped, and is never heard of."""
    seconds = HANG_SECONDS if number == signal.SIGKILL else 1.0
    options = launched.config(tmp_path, nproc=3, epochs=2, trace=0, start_seconds=seconds)
    with struck_at_start(1, number), pytest.raises(RunFailedError, match=what):
        run(options)
    assert not workers()
    assert not (tmp_path / "partial").exists(), "the folder is free"


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / os.environ["RANK"]).touch()
while len(list(here.iterdir())) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(10_000)
"""


@pytest.mark.slow
def test_one_torchrun_agent_ends_all_its_workers_with_one(tmp_path):
    """Nothing that a worker does can change it: hence one agent a worker."""
    script, here = tmp_path / "script.py", tmp_path / "here"
    script.write_text(SCRIPT)
    here.mkdir()
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
    done = run_torchrun([*options, script, here], tmp_path)
    assert done.returncode != 0
    assert "Sending process" in done.stderr, "it ends rank 0"
