"""Ranks as threads, and others that join them: what they take part in, and how they go."""

import json
import threading

import pytest
import torch

from gossipgrad import checkpoint
from gossipgrad.engine._members import Members
from gossipgrad.train import GossipConfig
from gossipgrad.train.strategies._gossip_run import Gossip
from support.launched import count
from support.newcomers import SAMPLES, Gated, Run, Slow


@pytest.fixture
def make(tmp_path):
    threads = torch.get_num_threads()
    yield lambda **options: Run(tmp_path, **options)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
def test_a_run_that_had_grown_is_resumed_from_the_consensus_of_all_and_grows_again(make):
    run = make(checkpoint_every=1000, **options("overlap"))
    rank, _ = run.join()
    run.stop.set()
    before = run.end()
    (step,) = checkpoint.steps(run.run_dir.checkpoints)
    assert checkpoint.find(run.run_dir.checkpoints).members == (0, 1, rank)
    resumed = make(resumed=True)
    assert resumed.join()[0] == rank, "a number of this start"
    begun = json.loads(resumed.run_dir.rank_joined(rank).read_text())["step"]
    resumed.stop.set()
    results = resumed.end()
    assert {*results} == {0, 1, rank}
    assert all(one.is_consensus for one in results.values())
    for one in (results[0], results[1]):
        assert one.steps > before[0].steps
        assert any("was saved by 3 ranks, and 2 went on" in n for n in one.notes)
    assert begun > results[rank].steps
    assert begun + results[rank].steps == rows(resumed.run_dir, rank)[-1]["step"]
    assert checkpoint.steps(run.run_dir.checkpoints)[-1] > step
    former = run.run_dir.path / "former" / run.run_dir.metrics(rank).name
    assert former.exists(), "of the one that was not resumed"


def options(mode):
    return {"options": {"gossip": GossipConfig(mode=mode, topology="matching")}}


@pytest.mark.parametrize("mode", ["overlap", pytest.param("stale", marks=pytest.mark.slow)])
def test_who_joins_stops_with_the_run_and_has_its_consensus(make, mode):
    run = make(checkpoint_every=1000, **options(mode))
    rank, _ = run.join()
    run.wait(lambda: count(run.run_dir.path, rank, "epoch") > 1)
    run.stop.set()
    results = run.end()
    assert sorted(results) == [0, 1, rank] == [0, 1, 2]
    assert all(one.is_consensus for one in results.values())
    assert len({one.accuracy for one in results.values()}) == 1
    assert all(one.lost == {} for one in results.values())
    assert all(one.joined["2"]["from_rank"] in (0, 1) for one in results.values())
    assert results[2].steps >= 8
    assert results[2].steps < max(results[0].steps, results[1].steps)
    assert results[2].stopped
    assert not results[2].left
    assert not run.run_dir.invitation.exists()
    assert run.run_dir.rank_model(2).exists()
    last = checkpoint.steps(run.run_dir.checkpoints)[-1]
    assert checkpoint.find(run.run_dir.checkpoints, step=last).members == (0, 1, 2)


def test_who_joins_comes_to_the_end_of_the_run_with_the_others(make, monkeypatch):
    monkeypatch.setattr(Slow, "pause_seconds", 0.25)  # so that it does not come too late
    run = make(epochs=12, **options("overlap"))
    run.join(steps=0)
    results = run.end()
    assert all(one.is_consensus for one in results.values())
    assert {one.epochs for one in results.values()} == {12}
    assert not any(one.stopped for one in results.values())
    assert sum(one.samples for one in results.values()) == 12 * SAMPLES
    last = json.loads(run.run_dir.metrics(2).read_text().splitlines()[-1])
    assert last["epoch"] == 11


@pytest.mark.slow
def test_of_several_who_join_one_leaves_and_is_not_missed(make):
    run = make(checkpoint_every=1000, **options("overlap"))
    (first, leave), (second, _) = run.join(), run.join()
    assert (first, second) == (2, 3)
    leave.set()
    run.wait(lambda: first in run.results)
    left = run.results[first]
    assert left.left
    assert not left.is_consensus
    assert left.notes == ()

    def said():
        return [event.get("text") for event in run.events]

    run.wait(lambda: "rank 2 has left" in said())
    for rank in (first, second):
        assert any(f"rank {rank} has joined, with the weights of rank" in str(e) for e in said())
    run.stop.set()
    results = run.end()
    assert {one.rank for one in results.values()} == {0, 1, 2, 3}
    for rank in (0, 1, second):
        assert results[rank].is_consensus
        assert results[rank].lost == {}
        assert not results[rank].left


@pytest.fixture
def sessions(monkeypatch):
    """The sessions of ranks that have evaluated, by rank."""
    found, evaluate = {}, Gossip.evaluate

    def noted(self, *args, **options):
        found[self.session.rank] = self.session
        return evaluate(self, *args, **options)

    monkeypatch.setattr(Gossip, "evaluate", noted)
    return found


@pytest.fixture
def held(make, sessions, monkeypatch):
    """Two ranks in the middle of an evaluation, one that is just about to enter; the epoch."""
    evaluating, enter = threading.Event(), Members.enter

    def late(*args):
        run.dataset.test.gate.shut_for = 2
        run.wait(lambda: run.dataset.test.gate.waiting == 2)
        evaluating.set()
        enter(*args)

    monkeypatch.setattr(Members, "enter", late)
    run = make(train=Gated, batch_size=1, **options("overlap"))
    rank, _ = run.begin_to_join()
    run.wait(evaluating.is_set)
    epoch = rows(run.run_dir, 0)[-1]["epoch"]
    return run, rank(), epoch


def rows(run_dir, rank):
    """The steps that a rank has told of."""
    found = map(json.loads, run_dir.metrics(rank).read_text().splitlines())
    return [each for each in found if each["event"] == "step"]


@pytest.mark.slow
def test_who_joins_during_an_evaluation_trains_with_the_others_from_its_end_on(held):
    run, rank, epoch = held
    run.dataset.train.gate.open.clear()
    run.dataset.test.gate.open.set()
    run.wait(lambda: run.dataset.train.gate.waiting == 3)  # all are at their first batch
    run.dataset.train.gate.open.set()
    run.wait(lambda: count(run.run_dir.path, rank, "epoch") > 1)
    run.stop.set()
    results = run.end()
    assert rows(run.run_dir, rank)[0]["epoch"] == epoch + 1
    assert all(one.is_consensus and one.notes == () for one in results.values())
    assert len({one.accuracy for one in results.values()}) == 1


@pytest.mark.slow
def test_who_joins_has_a_part_in_an_evaluation_that_is_tried_again(held, sessions):
    run, rank, epoch = held
    run.dataset.test.gate.deadly["rank 1"] = sessions[1].close
    run.dataset.test.gate.open.set()
    run.wait(lambda: count(run.run_dir.path, rank) > 1)
    run.stop.set()
    results = run.end()
    assert rows(run.run_dir, rank)[0]["epoch"] == epoch + 1
    assert {*results} == {0, rank}
    assert all(one.is_consensus and one.notes == () for one in results.values())
