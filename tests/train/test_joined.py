"""The end of a run that others have joined: what is told of them, and what stays theirs."""

import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gossipgrad.comm import AskedStore, Membership
from gossipgrad.report import write_report
from gossipgrad.train import TrainConfig
from gossipgrad.train._ending import clean_up
from gossipgrad.train._folder import RunDir
from gossipgrad.train._summary import compose
from gossipgrad.train.strategies._gossip_run import Gossip
from support.results import result

HOW = {"from_rank": 1, "generation": 2, "when_seconds": 1e9}
LOSS = {"why": "no sign of life for 10 s", "generation": 3, "when_seconds": 2e9}


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path)
    made.partial.mkdir()
    return made


def knows(rank, *joined, **changes):
    return result(rank, joined={str(one): HOW for one in joined}, **changes)


def composed(run_dir, results, lost):
    return compose(
        TrainConfig(nproc=2),
        {one.rank: one for one in results},
        lost,
        world_size=2,
        exported=results[0],
        stopped_by=None,
        run_dir=run_dir,
    )


def test_the_summary_tells_who_joined_and_what_they_did(run_dir):
    run_dir.rank_joined(3).write_text('{"step": 40}')
    step = {"event": "step", "step": 65, "epoch": 1, "seconds": 9.0, "samples": 400}
    run_dir.metrics(3).write_text(json.dumps(step) + "\n")
    left = knows(2, 2, 3, 4, steps=5, samples=50, stopped=True, left=True)
    end = knows(4, 2, 3, 4, steps=8, samples=80)
    ranks = [knows(0, 2, 3, 4, lost={"3": LOSS}), knows(1, 2, 3, 4), left, end]
    summary = composed(run_dir, ranks, {3: "was taken for dead: no sign of life for 10 s"})
    how = {"when_seconds": 1e9, "from_rank": 1, "generation": 2}
    assert summary["joined"] == [
        {"rank": 2, **how, "steps": 5, "samples": 50, "end": "left"},
        {"rank": 3, **how, "steps": 25, "samples": 400, "end": "lost"},
        {"rank": 4, **how, "steps": 8, "samples": 80, "end": "finished"},
    ]
    assert summary["world_size"] == 2
    assert summary["steps_per_rank"] == [10, 10, 5, None, 8], "behind those of the start"
    assert summary["lost_ranks"] == [3]
    assert not summary["interrupted"], "the run went on without the one that left"
    assert composed(run_dir, [result(0), result(1)], {})["joined"] == []
    (run_dir.path / "summary.json").write_text(json.dumps(summary))
    run_dir.config.write_text('{"nproc": 2}')
    page = write_report(run_dir.path).read_text()
    assert "Rank 2 joined from rank 1" in page
    assert "25 steps" in page


def test_a_run_that_failed_leaves_what_was_learned_and_their_folder_to_those_who_go_on(run_dir):
    store = AskedStore(dist.HashStore())
    run_dir.invitation.touch()
    run_dir.rank_joined(2).touch()
    clean_up(run_dir, store, range(2))
    assert run_dir.partial.exists()
    assert not run_dir.invitation.exists()
    run_dir.rank_joined(2).unlink()
    run_dir.rank_result(1).write_text(json.dumps({"result": result(1).to_json()}))
    clean_up(run_dir, store, range(2))
    assert run_dir.rank_result(1).exists()
    run_dir.rank_result(1).write_text('{"cause": "failed: no memory"}')
    clean_up(run_dir, store, range(2))
    assert not run_dir.partial.exists()


@pytest.mark.parametrize(("departed", "leaves"), [(set(), True), ({0}, False)])
def test_the_last_one_that_is_left_does_not_leave_but_ends_the_run(departed, leaves):
    strategy = object.__new__(Gossip)
    living = Membership(generation=3, living=(0, 2))
    strategy._session = SimpleNamespace(
        rank=2, membership=living, unreachable=dict.fromkeys(departed, "left")
    )
    strategy._joiner = SimpleNamespace(leaves=True, is_over=False)
    assert strategy._leaves == leaves
