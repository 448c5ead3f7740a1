"""Every strategy and mode goes on bit for bit; unlike numbers of ranks, and steps, go on at all."""

import dataclasses
import json

import pytest
import torch

from gossipgrad import checkpoint, data
from gossipgrad.train import GossipConfig, build_model, config_of_run
from gossipgrad.train._folder import RunDir
from gossipgrad.train._optimizers import make_optimizers
from gossipgrad.train._state import begin_from_consensus
from support.processes import run_processes
from support.resumed_ranks import Act, play
from support.resumed_runs import assert_same_runs, state_of

pytestmark = pytest.mark.process
RANKS = 3  # where gloo's sums go by the place in a message
STALE = GossipConfig(mode="stale", topology="matching")
EXACT = {
    "sync": {"options": {"gossip": GossipConfig(mode="sync", every=2)}},
    "overlap-matching": {"options": {"gossip": GossipConfig(topology="matching")}},
    "allreduce": {"strategy": "allreduce"},
}
ACTS = [
    *(Act(name=name, options=options) for name, options in EXACT.items()),
    *(Act(name=f"{name}-again", resumes=name, options={"resume_step": 3}) for name in EXACT),
    Act(name="overlap", options={"lr_rule": "linear"}),
    Act(name="overlap-stopped", options={"lr_rule": "linear"}, stops=(3, 0, 1)),
    Act(name="overlap-on", resumes="overlap-stopped"),
    Act(name="overlap-over", resumes="overlap"),
    Act(name="two", resumes="overlap", options={"resume_step": 3}, world_size=2),
    Act(name="local", options={"strategy": "local"}),
    Act(name="local-two", resumes="local", world_size=2),
    Act(name="stale", options={"options": {"gossip": STALE}, "checkpoint_every": 4}),
    Act(
        name="stale-again",
        resumes="stale",
        options={"checkpoint_every": 3, "trace": 2, "epochs": 3},
        patient=True,
    ),
]
CUT_SHORT = [
    *(
        (act.name, act.resumes)
        for act in ACTS
        if act.name.endswith("-again") and act.name != "stale-again"
    ),
    ("overlap-on", "overlap"),
    ("overlap-over", "overlap"),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The folder of all runs, and what each act came to by rank."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"grouped": False}
    found = run_processes(RANKS, play, str(folder), RANKS, ACTS, **options)
    return folder, found


def came_to(played, name):
    """What an act came to on the ranks that took part."""
    ended = [of_rank[name] for of_rank in played[1] if name in of_rank]
    for rank, one in enumerate(ended):
        assert not isinstance(one, str), f"rank {rank}: {one}"
    return ended


@pytest.mark.parametrize(("again", "whole"), CUT_SHORT)
def test_a_run_that_was_cut_short_comes_to_what_it_would_have_bit_for_bit(played, again, whole):
    came_to(played, whole)
    came_to(played, again)
    assert_same_runs(played[0] / again, played[0] / whole, RANKS)


@pytest.mark.parametrize("name", ["overlap"])
def test_ranks_that_are_told_one_by_one_stop_after_as_many_steps(played, name):
    results = [one["result"] for one in came_to(played, f"{name}-stopped")]
    (steps,) = {result["steps"] for result in results}
    assert 0 < steps <= 8
    assert all(result["stopped"] == (steps < 8) for result in results)
    assert checkpoint.steps(played[0] / f"{name}-stopped" / "checkpoints")[-1] == steps


def test_the_rate_on_another_number_of_ranks_is_that_of_these(played):
    results = [one["result"] for one in came_to(played, "two")]
    config = config_of_run(played[0] / "two").resolved(nproc=2, out=played[0])
    batches = results[0]["steps"]
    assert batches == 12  # of 719 samples a rank
    for rank in range(2):
        (group,) = state_of(played[0] / "two", rank)["optimizers"][0]["groups"]
        assert group["initial_lr"] == config.learning_rate.peak == 0.2
    rates = config.learning_rate
    early = checkpoint.steps(played[0] / "two" / "checkpoints")[-2]
    state = state_of(played[0] / "two", 0, early)
    done = state["loop"]["metrics"]["steps"]
    expected = rates.peak * rates.factor(done, steps_per_epoch=12, epochs=1)
    assert state["optimizers"][0]["groups"][0]["lr"] == pytest.approx(expected)


def test_others_begin_with_the_mean_of_the_saved_replicas(played):
    path = played[0] / "overlap"
    config = dataclasses.replace(config_of_run(path), resume=path, resume_step=3, nproc=2).resolved(
        nproc=2, out=path
    )
    model = build_model("mlp", data.load("digits").info)
    with pytest.warns(UserWarning, match="by 3 ranks, and 2 went on from their consensus"):
        begun, _ = begin_from_consensus(
            config,
            RunDir(path),
            model,
            make_optimizers(config, model),
            rank=0,
            world_size=2,
            epoch_batches=12,
        )
    assert (begun.epoch, begun.batch, begun.metrics["steps"]) == (0, 4, 4)
    for name, mean in checkpoint.consensus(path / "checkpoints", step=3).items():
        assert torch.equal(model.state_dict()[name], mean)
    assert checkpoint.find(played[0] / "two" / "checkpoints").members == (0, 1)


def test_replicas_that_never_met_are_not_made_one(played):
    for of_rank in played[1][:2]:
        assert (
            "nproc is 2, but the checkpoint of step 8 is of 3 ranks, each of"
            in of_rank["local-two"]
        )


def test_mode_stale_goes_on_with_checkpoints_and_a_trace(played):
    ended = came_to(played, "stale-again")
    before = checkpoint.steps(played[0] / "stale" / "checkpoints")
    whole = checkpoint.steps(played[0] / "stale-again" / "checkpoints")
    assert [step for step in whole if max(before) < step < max(whole)], (before, whole)
    for rank, one in enumerate(ended):
        lines = RunDir(played[0] / "stale-again").rank_trace(rank).read_text().splitlines()[1:]
        traced = [json.loads(line) for line in lines]
        forward = [line["attributes"]["step"] for line in traced if line["name"] == "forward"]
        assert len(forward) == 2, (rank, one["result"]["steps"])
