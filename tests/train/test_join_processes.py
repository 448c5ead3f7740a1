"""Workers that join a run under way, in real processes."""

import signal
import threading
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from gossipgrad.train import JoinConfig, _join_launcher, join_run, run
from gossipgrad.train._signals import Stops
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
from support.waiting import until

pytestmark = pytest.mark.process
ENDLESS = 10_000


@pytest.mark.slow
def test_a_run_grows_from_three_to_six_and_shrinks_to_two(tmp_path, capfd, monkeypatch):
    """Three join, and leave as by Ctrl-C; then a rank of the start is killed."""
    stops, told = Stops(), {}
    monkeypatch.setattr(_join_launcher, "catch_stops", lambda: nullcontext(stops))

    def join():
        told["joined"] = join_run(JoinConfig(run=tmp_path, nproc=3, quiet=True))

    def grow_and_shrink():
        joining = threading.Thread(target=join)
        joining.start()
        until(lambda: all(count(tmp_path, rank) > 10 for rank in (3, 4, 5)), 100)
        told["mode"] = (tmp_path / "invitation.json").stat().st_mode & 0o777
        stops.caught.append(signal.SIGINT)
        joining.join(100)
        kill(0)()
        wait_for_more(tmp_path, 1, "epoch", 2)
        press_ctrl_c()

    with after_steps(tmp_path, 20, grow_and_shrink):
        outcome = run(config(tmp_path, nproc=3, epochs=ENDLESS, trace=0))
    assert told["joined"].exit_code == 130
    assert told["joined"].summary is None, "it goes on"
    assert [part["left"] for part in told["joined"].parts] == [True] * 3
    assert told["mode"] == 0o600
    summary = outcome.summary
    assert outcome.exit_code == 130
    assert summary["lost_ranks"] == [0], "who left is not lost"
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
    assert "gossipgrad: leaving the run, which goes on; once more to end at once" in said
    for rank in (3, 4, 5):
        assert f"gossipgrad: rank {rank} has joined, with the weights of rank" in said
        assert f"gossipgrad: rank {rank} has left" in said
    assert not {"invitation.json", "partial"} & {path.name for path in tmp_path.iterdir()}
    assert not workers()


def test_a_run_goes_on_with_those_who_joined_when_all_others_are_killed(tmp_path):
    """And stops with them at a Ctrl-C; who comes after that is too late."""
    joined = []

    def join():
        options = JoinConfig(run=tmp_path, nproc=2, quiet=True)
        thread = threading.Thread(target=lambda: joined.append(join_run(options)))
        thread.start()
        until(lambda: all(count(tmp_path, rank) > 5 for rank in (2, 3)), 100)
        for rank in (0, 1):
            kill(rank)()
        until(lambda: not {"gossipgrad-rank0", "gossipgrad-rank1"} & {*workers()}, 60)
        wait_for_more(tmp_path, 2, "epoch", 2)
        press_ctrl_c()
        thread.join(100)

    with after_steps(tmp_path, 20, join):
        outcome = run(config(tmp_path, nproc=2, epochs=ENDLESS, trace=0))
    assert [part["rank"] for part in joined[0].parts] == [2, 3]
    assert not any(part["left"] for part in joined[0].parts)
    assert joined[0].summary == outcome.summary
    assert joined[0].exit_code == 0, "here nobody stopped it"
    assert outcome.exit_code == 130
    summary = outcome.summary
    assert summary["lost_ranks"] == [0, 1]
    assert summary["interrupted"]
    assert summary["model_is_consensus"]
    assert summary["model_from_rank"] == 2
    assert summary["accuracy"] > 0.9
    assert {one["end"] for one in summary["joined"]} == {"finished"}
    with pytest.raises(ValueError, match="is over: begin another like it"):
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
    assert summary["steps_per_rank"][2] == joined[0].parts[0]["steps"] > 8
    assert summary["model_is_consensus"]
    assert summary["lost_ranks"] == []
