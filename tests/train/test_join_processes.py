"""Workers that join a run under way, in real processes."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from gossipgrad.train import JoinConfig, join_run, run
from support.joined_world import train_until_joined
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
from support.processes import run_processes
from support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.process
ENDLESS = 10_000


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
    """Three join, and leave as by Ctrl-C; then a rank of the start is killed."""
    told = {}

    def grow_and_shrink():
        joining = [start_join(tmp_path) for _ in range(3)]
        until(lambda: all(count(tmp_path, rank) > 10 for rank in (3, 4, 5)))
        told["mode"] = (tmp_path / "invitation.json").stat().st_mode & 0o777
        for one in joining:
            one.send_signal(signal.SIGINT)
        told["said"] = [one.communicate(timeout=HANG_SECONDS)[0] for one in joining]
        told["codes"] = [one.returncode for one in joining]
        kill(0)()
        wait_for_more(tmp_path, 1, "epoch", 2)
        press_ctrl_c()

    with after_steps(tmp_path, 20, grow_and_shrink):
        outcome = run(config(tmp_path, nproc=3, epochs=ENDLESS, trace=0))
    assert told["codes"] == [130] * 3
    assert all("and left the run, which goes on" in said for said in told["said"])
    assert told["mode"] == 0o600
    summary = outcome.summary
    assert outcome.exit_code == 130
    assert summary["lost_ranks"] == [0], "one that left is not lost"
    assert [one["rank"] for one in summary["joined"]] == [3, 4, 5]
    assert {one["end"] for one in summary["joined"]} == {"left"}
    assert all(one["from_rank"] in {*range(6)} - {one["rank"]} for one in summary["joined"])
    for one in summary["joined"]:
        assert 10 < one["steps"] == summary["steps_per_rank"][one["rank"]]
        assert one["samples"] > 10 * 16
    assert summary["model_is_consensus"]
    assert summary["model_from_rank"] == 1
    assert summary["accuracy"] > 0.8
    said = capfd.readouterr().err
    for rank in (3, 4, 5):
        assert f"gossipgrad: rank {rank} has joined, with the weights of rank" in said
        assert f"gossipgrad: rank {rank} has left" in said
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


@pytest.mark.slow
def test_a_run_in_a_given_world_is_joined(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environs = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is hosted by no rank
        }
        for rank in range(2)
    ]
    joined = []

    def join():
        joined.append(join_run(JoinConfig(run=tmp_path, quiet=True)))

    with when((tmp_path / "invitation.json").exists, join):
        answers = run_processes(2, train_until_joined, environs, str(tmp_path), grouped=False)
    assert [code for code, _ in answers] == [130, 130]
    summary = answers[0][1]
    assert answers[1][1] is None, "put together once"
    assert joined[0].summary == summary
    assert [one["rank"] for one in summary["joined"]] == [2]
    assert summary["joined"][0]["end"] == "finished"
    assert summary["steps_per_rank"][2] == joined[0].steps > 8
    assert summary["model_is_consensus"]
    assert summary["lost_ranks"] == []
