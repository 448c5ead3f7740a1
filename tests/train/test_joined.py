"""The end of a run that others have joined: who is awaited, and what is told of them."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest

from gossipgrad.comm import Membership
from gossipgrad.trace import write_report
from gossipgrad.train import TrainConfig, _ending
from gossipgrad.train._ending import (
    clean_up,
    collect_joined,
    put_together_orphan,
    read_file,
    summary_lock,
)
from gossipgrad.train._layout import RunDir
from gossipgrad.train._summary import compose
from gossipgrad.train.strategies._gossip_run import Gossip
from support.results import result

HOW = {"from_rank": 1, "generation": 2, "when_seconds": 1e9}
LOSS = {"why": "no sign of life for 10 s", "generation": 3, "when_seconds": 2e9}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(_ending, "_POLL_SECONDS", 0.005)
    made = RunDir(tmp_path)
    made.partial.mkdir()
    return made


def knows(rank, *joined, **changes):
    return result(rank, joined={str(one): HOW for one in joined}, **changes)


def hand_in(run_dir, rank, **content):
    run_dir.rank_result(rank).write_text(json.dumps(content))


def collect(run_dir, *results, **options):
    found, lost = collect_joined(
        run_dir,
        {one.rank: one for one in results},
        read=lambda rank: read_file(run_dir, rank),
        **options,
    )
    return sorted(found), lost


def test_what_they_handed_in_is_taken(run_dir):
    hand_in(run_dir, 2, result=knows(2, 2, 3).to_json())
    hand_in(run_dir, 3, cause="failed: no memory")
    assert collect(run_dir, knows(0, 2, 3), knows(1, 2)) == ([2], {3: "failed: no memory"})
    assert collect(run_dir, result(0)) == ([], {}), "of nobody else"


def test_one_that_was_taken_for_dead_is_not_awaited(run_dir):
    run_dir.rank_joined(2).touch()
    told = collect(run_dir, knows(0, 2, lost={"2": LOSS}))
    assert told == ([], {2: "was taken for dead: no sign of life for 10 s"})


def test_one_that_shows_no_sign_of_life_is_awaited_for_a_while(run_dir, monkeypatch):
    monkeypatch.setattr(_ending, "_SILENT_SECONDS", 0.1)
    began = time.monotonic()
    lost = {2: "had handed nothing in by the end of the run"}
    assert collect(run_dir, knows(0, 2)) == ([], lost)
    assert time.monotonic() - began >= 0.1


def wait_beside(run_dir, *results, **options):
    """Collects in a thread; what is there when it is over."""
    told = []
    thread = threading.Thread(target=lambda: told.append(collect(run_dir, *results, **options)))
    thread.start()
    return thread, told


def live_on(run_dir, rank):
    """As long as the machine takes for the test."""
    run_dir.rank_joined(rank).touch()
    soon_seconds = time.time() + 3600
    os.utime(run_dir.rank_joined(rank), (soon_seconds, soon_seconds))


def test_one_that_lives_is_awaited(run_dir, monkeypatch):
    monkeypatch.setattr(_ending, "_SILENT_SECONDS", 0.0)
    live_on(run_dir, 2)
    thread, told = wait_beside(run_dir, knows(0, 2))
    thread.join(0.1)
    assert not told
    hand_in(run_dir, 2, result=knows(2, 2).to_json())
    thread.join(20)
    assert told == [([2], {})]


def test_but_not_for_ever(run_dir, monkeypatch):
    monkeypatch.setattr(_ending, "_END_SECONDS", 0.1)
    live_on(run_dir, 2)
    assert collect(run_dir, knows(0, 2)) == ([], {2: "had handed nothing in by the end of the run"})


def test_when_they_alone_are_left_they_are_awaited_as_long_as_they_live(run_dir, monkeypatch):
    monkeypatch.setattr(_ending, "_END_SECONDS", 0.0)
    live_on(run_dir, 2)
    thread, told = wait_beside(run_dir)
    thread.join(0.1)
    assert not told
    hand_in(run_dir, 2, result=knows(2, 2).to_json())
    thread.join(20)
    assert told == [([2], {})]


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


def test_a_run_that_failed_leaves_their_folder_to_those_who_go_on(run_dir):
    run_dir.rank_joined(2).touch()
    run_dir.invitation.touch()
    clean_up(run_dir)
    assert run_dir.partial.exists()
    assert not run_dir.invitation.exists()
    os.utime(run_dir.rank_joined(2), (1e9, 1e9))
    clean_up(run_dir)
    assert not run_dir.partial.exists()


def orphans(run_dir, *results):
    for one in results:
        hand_in(run_dir, one.rank, result=one.to_json())
        run_dir.rank_model(one.rank).write_bytes(b"")
    config = TrainConfig(nproc=2).resolved(nproc=2, out=run_dir.path)
    config.write(run_dir.config, {})
    return put_together_orphan(config, run_dir, {results[0].rank: results[0]})


def test_who_joined_puts_a_run_together_that_has_lost_all_others(run_dir):
    lost = {"0": LOSS, "1": LOSS}
    summary = orphans(run_dir, knows(2, 2, 3, lost=lost), knows(3, 2, 3, lost=lost))
    assert summary["lost_ranks"] == [0, 1]
    assert summary["steps_per_rank"] == [None, None, 10, 10]
    assert json.loads(run_dir.summary.read_text()) == summary
    assert run_dir.model.exists()
    assert not run_dir.partial.exists()


def test_it_is_left_to_the_run_while_that_lives(run_dir):
    lost = {"0": LOSS, "1": LOSS}
    assert orphans(run_dir, knows(2, 2, lost={"0": LOSS})) is None, "rank 1 may be at its end"
    with summary_lock(run_dir) as mine:
        assert mine, "as the launcher of a run holds it"
        assert orphans(run_dir, knows(2, 2, lost=lost)) is None
    assert orphans(run_dir, knows(2, 2, lost=lost)) is not None


def test_all_who_left_at_once_put_it_together_unless_others_go_on(run_dir):
    lost = {"0": LOSS, "1": LOSS}
    left = [knows(rank, 2, 3, 4, lost=lost, left=True) for rank in (2, 3)]
    run_dir.rank_joined(4).touch()
    assert orphans(run_dir, *left) is None, "rank 4 goes on"
    hand_in(run_dir, 4, cause="failed: no memory")
    summary = orphans(run_dir, *left)
    assert [one["end"] for one in summary["joined"]] == ["left", "left", "lost"]
    assert run_dir.model.exists()


@pytest.mark.parametrize(("departed", "leaves"), [(set(), True), ({0}, False)])
def test_the_last_one_that_is_left_does_not_leave_but_ends_the_run(departed, leaves):
    strategy = object.__new__(Gossip)
    living = Membership(generation=3, living=(0, 2))
    strategy._session = SimpleNamespace(
        rank=2, membership=living, unreachable=dict.fromkeys(departed, "left")
    )
    strategy._joiner = SimpleNamespace(leaves=True, is_over=False)
    assert strategy._leaves == leaves


@pytest.mark.parametrize("skew_seconds", [-60.0, 60.0])
def test_the_clock_of_this_machine_need_not_agree_with_that_of_files(
    run_dir, monkeypatch, skew_seconds
):
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + skew_seconds)
    run_dir.rank_joined(4).touch()
    clean_up(run_dir)
    assert run_dir.partial.exists(), "rank 4 goes on"
    old_seconds = clock() - 30.0
    os.utime(run_dir.rank_joined(4), (old_seconds, old_seconds))
    clean_up(run_dir)
    assert not run_dir.partial.exists()
