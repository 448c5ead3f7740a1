"""Which runs are needed, what they are told as, and that the page shows what is published."""

import json

import pytest

from benchmarks import sparse_time_to_accuracy as bench
from benchmarks._common import RESULTS
from benchmarks._pages import DOCS
from benchmarks.time_to_accuracy import Run
from gossipgrad.cli._train import parse

TASK = bench.TASKS[0]
LONGER, LONGEST = bench.LONGER


def trained(base, contestant, *points, seed=0):
    out = TASK.folder(contestant, seed, base)
    out.mkdir(parents=True)
    events = []
    for step, (seconds, accuracy) in enumerate(points, start=1):
        events.append(
            {"event": "step", "step": step, "step_seconds": 1.0, "train_seconds": seconds}
        )
        events.append({"event": "epoch", "step": step, "accuracy": accuracy})
    (out / "metrics-rank0.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    (out / "measured.json").write_text('{"cpu_busy": 0.9, "marked": false}')


def test_a_longer_run_is_needed_where_the_other_fell_short(tmp_path):
    longer = Run(TASK, LONGER, 0)
    assert not bench.is_needed(longer, tmp_path)
    trained(tmp_path, bench.DDP, (10.0, 0.4), (20.0, 0.8))
    trained(tmp_path, bench.OMGS, (5.0, 0.4), (10.0, 0.7))
    assert bench.is_needed(longer, tmp_path)
    trained(tmp_path, bench.DDP, (10.0, 0.4), (20.0, 0.8), seed=1)
    trained(tmp_path, bench.OMGS, (5.0, 0.4), (10.0, 0.9), seed=1)
    assert not bench.is_needed(Run(TASK, LONGER, 1), tmp_path)


def test_the_longest_run_is_needed_where_both_others_fell_short(tmp_path):
    trained(tmp_path, bench.DDP, (10.0, 0.4), (20.0, 0.8))
    trained(tmp_path, bench.OMGS, (5.0, 0.4), (10.0, 0.7))
    assert not bench.is_needed(Run(TASK, LONGEST, 0), tmp_path)
    trained(tmp_path, LONGER, (5.0, 0.4), (12.0, 0.75))
    assert bench.is_needed(Run(TASK, LONGEST, 0), tmp_path)
    trained(tmp_path, LONGEST, (5.0, 0.4), (10.0, 0.8))
    told = bench.row(TASK, tmp_path, seeds=1)
    assert told["shares_of_ddp_time"] == {"0": pytest.approx(0.5, abs=5e-3)}


def test_a_seeds_time_is_that_of_its_first_run_to_reach_the_target(tmp_path):
    trained(tmp_path, bench.DDP, (10.0, 0.4), (20.0, 0.8))
    trained(tmp_path, bench.OMGS, (5.0, 0.4), (10.0, 0.7))
    missed = bench.row(TASK, tmp_path, seeds=2)
    assert missed["shares_of_ddp_time"] == {"0": None}
    assert "not reached" in bench.page_table([missed])
    trained(tmp_path, LONGER, (10.0, 0.7), (14.0, 0.9))
    told = bench.row(TASK, tmp_path, seeds=2)
    assert told["shares_of_ddp_time"] == {"0": pytest.approx(0.599, abs=2e-3)}
    assert "0.60 of DDP's" in bench.page_table([told])


def test_a_task_of_which_nothing_is_there_stays_as_published(tmp_path):
    trained(tmp_path, bench.DDP, (10.0, 0.4), (20.0, 0.8))
    here = [bench.row(task, tmp_path, seeds=1) for task in bench.TASKS]
    published = [{**each, "runs": {bench.DDP: [{"seed": 7}]}} for each in here]
    assert bench.with_published(here, published) == [here[0], *published[1:]]
    assert bench.with_published(here, []) == here


@pytest.mark.parametrize("task", bench.TASKS, ids=lambda task: task.name)
def test_commands_are_taken_by_the_command_line(task):
    ddp, omgs, *longer = (parse(task.command(name, 3)[1:]) for name in bench.CONTESTANTS)
    assert ddp.strategy == "allreduce"
    assert {run.strategy for run in (omgs, *longer)} == {"omgs"}
    assert [run.epochs / ddp.epochs for run in (omgs, *longer)] == [1, 1.25, 1.5]
    assert omgs.seed == ddp.seed == 3


def test_the_page_shows_what_is_published():
    figures = json.loads((RESULTS / "sparse_time_to_accuracy.json").read_text())
    assert bench.page_table(figures["rows"]) in (DOCS / "sparsify.md").read_text()
