"""A run directory, whole and in pieces."""

import json

import pytest

from gossipgrad.trace import write_report
from gossipgrad.trace._runs import find_key, read_run
from support.html_page import Page


def test_reads_a_whole_run(write_run):
    run = read_run(write_run())
    assert (run.name, run.world_size, run.ranks, run.finished) == ("small", 4, [0, 1, 2, 3], True)
    assert [len(steps) for steps in run.steps.values()] == [30] * 4
    assert [len(epochs) for epochs in run.epochs.values()] == [3] * 4
    assert run.problems == ()


def test_skips_the_line_a_killed_worker_did_not_finish(write_run):
    directory = write_run()
    path = directory / "metrics-rank2.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(directory)
    assert len(run.steps[2]) == 30
    assert len(run.epochs[2]) == 2
    assert run.problems == (
        "1 line of metrics-rank2.jsonl could not be read and was left out: the worker was probably "
        "killed while it wrote.",
    )


def test_skips_a_line_cut_within_a_character(write_run):
    directory = write_run()
    with (directory / "metrics-rank0.jsonl").open("ab") as file:
        file.write('{"event": "step", "note": "\N{SNOWMAN}'.encode()[:-1])
    assert len(read_run(directory).steps[0]) == 30


def test_ranks_are_ordered_by_number(write_run):
    assert list(read_run(write_run(world_size=11)).steps) == list(range(11))


def test_tells_which_ranks_left_no_metrics(write_run):
    directory = write_run()
    (directory / "metrics-rank1.jsonl").unlink()
    (directory / "metrics-rank3.jsonl").unlink()
    assert "There are no metrics of ranks 1, 3." in read_run(directory).problems


def test_a_run_without_a_summary_says_so(write_run):
    directory = write_run()
    (directory / "summary.json").unlink()
    run = read_run(directory)
    assert not run.finished
    assert run.world_size == 4
    assert "left no summary.json" in run.problems[0]


@pytest.mark.parametrize("name", ["config.json", "summary.json", "trace.json"])
def test_a_broken_file_is_left_out_and_told(write_run, name):
    directory = write_run()
    (directory / name).write_text('{"half')
    assert f"{name} is no JSON object and was left out." in read_run(directory).problems


def test_refuses_a_directory_without_a_run(tmp_path):
    with pytest.raises(ValueError, match="missing is no directory; pass the directory that"):
        read_run(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no run: there is neither config"):
        read_run(tmp_path)


def test_find_key_prefers_the_outer_level():
    tree = json.loads('{"a": {"name": 1, "b": {"deep": 2}}, "c": {"name": 3}}')
    assert find_key(tree, "name") == 1
    assert find_key(tree, "deep") == 2
    assert find_key(tree, "none") is None


def test_lines_that_no_reader_can_bear_are_left_out(write_run):
    directory = write_run(world_size=1)
    with (directory / "metrics-rank0.jsonl").open("a") as file:
        file.write('{"event": "step", "step": ' + "9" * 5000 + "}\n" + "[" * 200_000 + "\n")
    run = read_run(directory)
    assert len(run.steps[0]) == 30
    assert run.problems[0].startswith("2 lines of metrics-rank0.jsonl could not be read")


@pytest.mark.parametrize("digits", [400, 308])
def test_absurd_numbers_are_no_numbers(write_run, digits):
    directory = write_run(world_size=2)
    (directory / "summary.json").unlink()
    for path in directory.glob("metrics-rank*.jsonl"):
        step, epoch = (json.loads(line) for line in path.read_text().splitlines()[-2:])
        absurd = dict.fromkeys(step | epoch, int("9" * digits))
        absurd |= {"outcomes": {"delivered": int("9" * digits)}}
        with path.open("a") as file:
            file.writelines(json.dumps(absurd | {"event": k}) + "\n" for k in ("step", "epoch"))
    page = Page(write_report(directory).read_text())
    assert page.data()["charts"][0]["series"][0]["points"][-1][0] == 30
    assert "n/a" in page.contents["span"], "the last step is not known"
