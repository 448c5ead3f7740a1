"""Workers that join a run under way, in real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gossipgrad import checkpoint
from gossipgrad.train import GossipConfig, JoinConfig, config_of_run, join_run, run
from support.launched import (
    after_steps,
    config,
    count,
    kill,
    press_ctrl_c,
    wait_for_more,
    when,
    workers,
)
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process
ENDLESS = 10_000
SAMPLES = 48
JOB = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from gossipgrad.train import Job

class Slow(torch.utils.data.Dataset):
    '''Samples that take their time until somebody has joined.'''

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if not Path("hurry").exists():
            time.sleep(self.seconds)
        return torch.full((4,), float(index % 3)), index % 3

def job():
    return Job(model=nn.Linear(4, 3), train=Slow(0.002), test=Slow(0.01), loss=cross_entropy)
"""


@pytest.fixture
def slow_job(tmp_path, monkeypatch):
    """Names a job that takes most of its time to evaluate."""
    (tmp_path / "slow_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "slow_job:job"


@contextlib.contextmanager
def joined_by_another(out, act, *, steps=8):
    """Has this process join the run in the block, and make so many steps; then calls `act`."""
    outcomes, threads = [], []

    def join():
        threads.append(
            threading.Thread(
                target=lambda: outcomes.append(join_run(JoinConfig(run=out, quiet=True)))
            )
        )
        threads[-1].start()
        until(lambda: count(out, 2) >= steps or not threads[-1].is_alive())
        act()

    with when((out / "invitation.json").exists, join):
        yield outcomes
    for thread in threads:
        thread.join(HANG_SECONDS)


def metrics(out, rank):
    """The steps that a rank has written."""
    lines = map(json.loads, (out / f"metrics-rank{rank}.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "step"]


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
@pytest.mark.parametrize("mode", ["overlap", pytest.param("stale", marks=pytest.mark.slow)])
def test_a_run_that_had_grown_stops_as_one_is_resumed_from_all_and_grows_again(slow_job, mode):
    out = Path("run")
    gossip = GossipConfig(mode=mode, topology="matching")
    options = {"job": slow_job, "batch_size": 4, "epochs": ENDLESS, "checkpoint_every": 1000}
    options |= {"nproc": 2, "trace": 0, "options": {"gossip": gossip}}

    def stop():
        until(lambda: count(out, 2, "epoch") > 1)
        press_ctrl_c()

    with joined_by_another(out, stop) as joined:
        before = run(config(out, **options)).summary
    assert before["interrupted"]
    assert before["model_is_consensus"]
    assert before["lost_ranks"] == []
    assert not [note for note in before["notes"] if "no consensus" in note]
    assert [(one["rank"], one["end"]) for one in before["joined"]] == [(2, "finished")]
    assert before["joined"][0]["from_rank"] in (0, 1)
    assert joined[0].summary == before
    assert not joined[0].left
    last = checkpoint.steps(out / "checkpoints")[-1]
    assert checkpoint.find(out / "checkpoints", step=last).members == (0, 1, 2)
    if mode == "stale":
        return
    with joined_by_another(out, stop) as joined:
        after = run(config_of_run(out)).summary
    assert any("was saved by 3 ranks, and 2 continued" in note for note in after["notes"])
    assert after["model_is_consensus"]
    assert [one["rank"] for one in after["joined"]] == [2]
    assert min(after["steps_per_rank"][:2]) > before["steps_per_rank"][0]
    assert metrics(out, 2)[0]["step"] > last
    assert (out / "former" / "metrics-rank2.jsonl").exists(), "of the one that was not resumed"
    assert checkpoint.steps(out / "checkpoints")[-1] > last


def test_one_that_joins_comes_to_the_end_of_the_run_with_the_others(slow_job):
    out = Path("run")
    with joined_by_another(out, Path("hurry").touch, steps=1) as joined:
        outcome = run(config(out, job=slow_job, nproc=2, epochs=12, batch_size=4, trace=0))
    assert joined[0].summary == outcome.summary
    assert outcome.summary["model_is_consensus"]
    assert not outcome.summary["interrupted"]
    assert [one["end"] for one in outcome.summary["joined"]] == ["finished"]
    assert sum(metrics(out, rank)[-1]["samples"] for rank in range(3)) == 12 * SAMPLES
    assert metrics(out, 2)[-1]["epoch"] == 11


def start_join(folder):
    """The command in a process of its own, which takes signals."""
    return subprocess.Popen(
        [sys.executable, "-m", "gossipgrad", "train", "--join", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_run_grows_from_three_to_six_and_shrinks_to_two(tmp_path, capfd):
    """Of three that join two leave as by Ctrl-C; the third and a rank of the start are killed."""
    told = {}

    def grow_and_shrink():
        joining = [start_join(tmp_path) for _ in range(3)]
        until(lambda: all(count(tmp_path, rank) > 10 for rank in (3, 4, 5)))
        told["mode"] = (tmp_path / "invitation.json").stat().st_mode & 0o777
        for one, number in zip(
            joining, (signal.SIGINT, signal.SIGINT, signal.SIGKILL), strict=True
        ):
            one.send_signal(number)
        told["said"] = [one.communicate(timeout=HANG_SECONDS)[0] for one in joining[:2]]
        joining[2].communicate(timeout=HANG_SECONDS)
        told["codes"] = [one.returncode for one in joining]
        kill(0)()
        wait_for_more(tmp_path, 1, "epoch", 2)
        press_ctrl_c()

    with after_steps(tmp_path, 20, grow_and_shrink):
        outcome = run(config(tmp_path, nproc=3, epochs=ENDLESS, trace=0))
    assert told["codes"] == [130, 130, -signal.SIGKILL]
    assert all("and left the run, which continues" in said for said in told["said"])
    assert told["mode"] == 0o600
    summary = outcome.summary
    assert outcome.exit_code == 130
    assert [one["rank"] for one in summary["joined"]] == [3, 4, 5]
    assert sorted(one["end"] for one in summary["joined"]) == ["left", "left", "lost"]
    (lost,) = [one["rank"] for one in summary["joined"] if one["end"] == "lost"]
    assert summary["lost_ranks"] == [0, lost], "one that left is not lost"
    assert all(one["from_rank"] in {*range(6)} - {one["rank"]} for one in summary["joined"])
    for one in summary["joined"]:
        steps = None if one["rank"] == lost else one["steps"]
        assert summary["steps_per_rank"][one["rank"]] == steps
        assert one["steps"] > 10
        assert one["samples"] > 10 * 16
        assert 14 * one["steps"] < one["samples"] <= 16 * one["steps"], (
            "an epoch's last batch is less"
        )
    assert summary["model_is_consensus"]
    assert summary["model_from_rank"] == 1
    assert summary["accuracy"] > 0.8
    said = capfd.readouterr().err
    for rank in (3, 4, 5):
        assert f"gossipgrad: rank {rank} has joined, with the weights of rank" in said
        assert f"rank {rank} {'is lost' if rank == lost else 'has left'}" in said
    assert not {"invitation.json", "partial"} & {path.name for path in tmp_path.iterdir()}
    assert not workers()


@pytest.mark.slow  # two generations of processes, one after the other
def test_a_run_goes_on_with_those_who_joined_when_all_others_are_killed(tmp_path):
    """They put it together, and who comes after that is too late."""
    joined = []

    def join():
        options = JoinConfig(run=tmp_path, quiet=True)
        pids = [process.pid for process in workers().values()]
        threads = [
            threading.Thread(target=lambda: joined.append(join_run(options))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: all(count(tmp_path, rank) > 5 for rank in (2, 3)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join(HANG_SECONDS)

    with after_steps(tmp_path, 20, join):
        outcome = run(config(tmp_path, nproc=2, epochs=150, trace=0))
    assert {one.rank for one in joined} == {2, 3}
    assert not any(one.left for one in joined)
    assert all(one.summary == outcome.summary for one in joined)
    assert {one.exit_code for one in (*joined, outcome)} == {0}
    summary = outcome.summary
    assert summary["lost_ranks"] == [0, 1]
    assert not summary["interrupted"]
    assert summary["model_is_consensus"]
    assert summary["model_from_rank"] == 2
    assert summary["accuracy"] > 0.9
    assert {one["end"] for one in summary["joined"]} == {"finished"}
    with pytest.raises(ValueError, match="is not training"):
        join_run(JoinConfig(run=tmp_path))
