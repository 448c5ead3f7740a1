"""Islands of the command: ranks that share a replica, from the options to the summary."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from gossipgrad.checkpoint import load
from gossipgrad.train import TrainConfig, check, config_of_run, run
from support.launched import after_steps, config, kill, press_ctrl_c

pytestmark = pytest.mark.process


def weights(out, rank, step):
    return load(out / "checkpoints", rank=rank, step=step)["model"]


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def check_equal_inside(out, ranks):
    """Ranks of an island end with equal weights, and islands with unequal ones."""
    first, *others = [weights(out, rank, None) for rank in ranks]
    for one, other in zip([first, *others][::2], others[::2], strict=True):
        assert equal(one, other)
    assert not any(equal(first, other) for other in others[1:])


def check_partners(out):
    """Each rank exchanges with those of its number in other islands."""
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "exchange" and event["ph"] == "X"]
    met = {(event["pid"], event["args"]["recv_from"]) for event in spans}
    assert met == {(0, 2), (1, 3), (2, 0), (3, 1)}


def made(out, **options):
    return config(out, island=2, **options)


@pytest.mark.parametrize(
    ("options", "processes", "says"),
    [
        ({"island": 2}, 3, "3 processes are no multiple of it: start 4"),
        ({"island": 2, "strategy": "allreduce"}, 4, "no islands: use --strategy gossip"),
        ({"island": 2, "apoptosis": 0.01}, 4, "--apoptosis"),
        ({"island": 2, "options": {"gossip": {"payload": "gradients"}}}, 4, "payload"),
        ({"island": 2, "options": {"gossip": {"topology": "hypercube"}}}, 6, "power of two"),
        ({"island": 0}, 4, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(options, processes, says):
    with pytest.raises(ValueError, match=says):
        check(TrainConfig(**options), processes)


def test_an_island_may_be_a_machine(monkeypatch):
    world = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="island is 4, but 6 processes"):
        check(TrainConfig(island="node"), 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    check(TrainConfig(island="node"), 6)


def test_islands_train_and_a_run_that_was_stopped_is_resumed_bit_for_bit(tmp_path):
    options = {"nproc": 4, "checkpoint_every": 10, "options": {"gossip": {"disagreement": True}}}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = run(made(whole, epochs=2, **options)).summary
    assert summary["accuracy"] > 0.8
    assert summary["model_is_consensus"]
    assert (summary["world_size"], summary["island"], summary["lost_ranks"]) == (4, 2, [])
    assert "4 workers in islands of 2" in (whole / "report.html").read_text()
    check_equal_inside(whole, range(4))
    check_partners(whole)

    with after_steps(stopped, 5, press_ctrl_c, rank=2, before=20):
        part = run(made(stopped, epochs=2, **options)).summary
    assert part["interrupted"]
    assert len({*part["steps_per_rank"]}) == 1, "all stop before the same step"
    resumed = run(dataclasses.replace(config_of_run(stopped), quiet=True)).summary
    assert resumed["steps"] == summary["steps"]
    assert equal(*(load_file(each / "model.safetensors") for each in (whole, stopped)))


def test_islands_of_mode_stale_are_equal_inside(tmp_path):
    options = {"nproc": 4, "checkpoint_every": 10, "options": {"gossip": {"mode": "stale"}}}
    summary = run(made(tmp_path, epochs=1, **options)).summary
    assert summary["model_is_consensus"]
    first, second, third, fourth = summary["steps_per_rank"]
    assert first == second
    assert third == fourth
    check_equal_inside(tmp_path, range(4))


def test_an_island_ends_with_one_of_its_ranks_and_the_others_finish(tmp_path):
    with after_steps(tmp_path, 5, kill(3), rank=3, before=20):
        summary = run(made(tmp_path, nproc=6, epochs=2, checkpoint_every=10)).summary
    assert summary["lost_ranks"] == [2, 3]
    assert "SIGKILL" in summary["lost_because"]["3"]
    assert summary["model_is_consensus"]
    assert not summary["interrupted"]
    check_equal_inside(tmp_path, [0, 1, 4, 5])


def test_one_island_alone_averages_gradients(tmp_path):
    with pytest.warns(UserWarning, match="no other island"):
        summary = run(made(tmp_path, nproc=2, max_steps=10, checkpoint_every=5)).summary
    assert summary["steps_per_rank"] == [10, 10]
    check_equal_inside(tmp_path, range(2))
