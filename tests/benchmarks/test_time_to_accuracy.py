"""Which runs are needed, and what is kept of them; training is made up."""

import json
from dataclasses import replace

import pytest

from benchmarks import time_to_accuracy as bench
from benchmarks._common import alone
from benchmarks.network._namespaces import missing
from gossipgrad.cli._train import parse

REACHED = {"ddp": 0.8, "gossip": 0.7, "gossip, a quarter more epochs": 0.9}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs `main`; the contestants that were trained, and the results."""
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    family, names = bench.FAMILIES["gossip"], []

    def train(command, task, out, timeout_seconds):
        known = {
            str(family.folder(run, out.parent)): run for run in bench.order(family, family.tasks, 3)
        }
        run = known[str(out)]
        names.append(run.contestant)
        if run.task.name.startswith("CIFAR") and run.contestant == "gossip":
            raise bench.FailedRunError("its ranks ended with [0, 1, 0, 0]")
        out.mkdir(parents=True)
        events = [
            {"event": "step", "step": 10, "step_seconds": 1.0, "train_seconds": 10.0},
            {"event": "epoch", "step": 10, "accuracy": 0.4},
            {"event": "step", "step": 20, "step_seconds": 1.0, "train_seconds": 20.0},
            {"event": "epoch", "step": 20, "accuracy": REACHED[run.contestant]},
        ]
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (out / "metrics-rank0.jsonl").write_text(lines)
        (out / "measured.json").write_text('{"cpu_busy": 0.9, "marked": false}')

    monkeypatch.setattr(bench, "train", train)

    def main(*arguments):
        names.clear()
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--folder", str(tmp_path / "runs")])
        code = bench.main()
        path = tmp_path / "runs" / "time_to_accuracy.json"
        return code, list(names), json.loads(path.read_text()) if path.exists() else None

    return main


def test_longer_runs_follow_where_a_shorter_one_fell_short(trained, tmp_path):
    code, names, held = trained("--only", "fashion", "--world-size", "4", "--seeds", "1")
    assert (code, names) == (0, ["ddp", "gossip", "gossip, a quarter more epochs"])
    row, *_ = held["rows"]
    assert not (tmp_path / "results").exists(), "other tasks are missing"
    # 0.4 after 10 s, 0.9 after 20: 0.8 after 18 of DDP's 20.
    assert row["shares_of_ddp_time"] == {"0": 0.9}
    assert row["runs"]["gossip"][0]["seconds_to_target"] is None
    assert trained("--only", "fashion", "--world-size", "4", "--seeds", "1")[1] == []


def test_a_run_that_failed_is_tried_again(trained):
    for _ in range(2):
        code, names, held = trained("--only", "cifar", "--world-size", "4", "--seeds", "1")
        assert code == 1
        assert names[-1] == "gossip"
        assert list(held["failed"].values()) == ["its ranks ended with [0, 1, 0, 0]"]


def test_a_second_process_in_a_folder_is_refused(trained, tmp_path):
    with alone(tmp_path / "runs" / "lock"):
        assert trained("--only", "fashion")[:2] == (2, [])


@pytest.mark.parametrize("name", bench.FAMILIES)
def test_every_command_is_one_of_gossipgrad(name, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    family = bench.FAMILIES[name]
    for run in bench.order(family, family.tasks, 1):
        command = family.command(run)
        config = parse(command[1:])
        assert config.strategy == command[command.index("--strategy") + 1]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(bool(missing()), reason="needs root")
def test_a_small_task_from_hosts_to_results(tmp_path, monkeypatch):
    digits = ("--data", "digits", "--model", "mlp", "--batch-size", "64")
    task = bench.Task("digits, MLP", 2, 5e7, 1, digits)
    gossip = {"gossip": (("gossip",), 1.0)}
    family = replace(bench.FAMILIES["gossip"], tasks=(task,), contestants=gossip, longer=())
    monkeypatch.setattr(bench, "SEEDS", 1)
    monkeypatch.setitem(bench.FAMILIES, "gossip", family)
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["bench", "--seeds", "1", "--folder", str(tmp_path / "runs")])
    assert bench.main() == 0
    written = json.loads((tmp_path / "results" / "time_to_accuracy.json").read_text())
    (row,) = written["rows"]
    assert written["missing"] == []
    assert len(row["runs"]["ddp"]) == len(row["runs"]["gossip"]) == 1
    for run in (*row["runs"]["ddp"], *row["runs"]["gossip"]):
        assert run["sent_bytes"] > 100_000
        assert run["train_seconds"] > 0
