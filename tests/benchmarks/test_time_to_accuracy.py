"""Which runs come first, what is kept of them, and what is written when some are missing."""

import json
from dataclasses import replace

import pytest

from benchmarks import time_to_accuracy as bench

FASHION, CIFAR = bench.TASKS[:2]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs `main`; training is made up, and told."""
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    names = []
    reached = {"ddp": 0.8, "gossip": 0.7, "gossip, a quarter more epochs": 0.9}

    def train(run, out, timeout_seconds):
        names.append(run.name)
        if "CIFAR" in run.name and run.contestant == "gossip":
            raise bench.FailedRunError("its ranks ended with [0, 1, 0, 0]")
        out.mkdir()
        events = [
            {"event": "step", "step": 10, "step_seconds": 1.0, "train_seconds": 10.0},
            {"event": "epoch", "step": 10, "accuracy": 0.4},
            {"event": "step", "step": 20, "step_seconds": 1.0, "train_seconds": 20.0},
            {"event": "epoch", "step": 20, "accuracy": reached[run.contestant]},
        ]
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (out / "metrics-rank0.jsonl").write_text(lines)
        (out / "measured.json").write_text('{"cpu_busy": 0.9, "marked": false}')

    monkeypatch.setattr(bench, "train", train)

    def main(*arguments, gossip=0.7):
        names.clear()
        reached["gossip"] = gossip
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--folder", str(tmp_path / "runs")])
        code = bench.main()
        held = json.loads((tmp_path / "results" / "time_to_accuracy.json").read_text())
        return code, list(names), held

    return main


def test_a_seed_of_every_task_comes_before_the_next_and_longer_runs_last():
    runs = [(r.task, r.contestant, r.seed) for r in bench.order([FASHION, CIFAR], 2)]
    longer = "gossip, a quarter more epochs"
    first = [(task, name, 0) for task in (FASHION, CIFAR) for name in ("ddp", "gossip")]
    assert runs[:6] == [*first, (FASHION, longer, 0), (CIFAR, longer, 0)]
    assert {seed for *_, seed in runs[6:]} == {1}
    assert len(runs) == 12


def test_what_is_missing_or_failed_is_named_and_done_runs_are_kept(trained):
    code, names, held = trained("--only", "fashion", "--world-size", "4", "--seeds", "1")
    assert code == 0
    assert names == [f"Fashion-MNIST, LeNet, 4 hosts, {name}, seed 0" for name in bench.CONTESTANTS]
    assert len(held["rows"]) == 4
    assert len(held["missing"]) == 9
    row = held["rows"][0]
    assert row["ratio_of_times_to_ddp"] == 0.9
    assert row["runs"]["gossip"][0]["seconds_to_ddp_accuracy"] is None
    assert row["runs"][bench.LONGER][0]["seconds_to_ddp_accuracy"] == pytest.approx(18.0)
    assert row["runs"]["gossip"][0]["cpu_busy"] == 0.9
    assert held["rows"][1]["ratio_of_times_to_ddp"] is None
    code, names, held = trained("--world-size", "4", "--seeds", "1")
    assert code == 1
    assert all(name.startswith("CIFAR") for name in names)
    failed = "CIFAR-10 small, ResNet-20, 4 hosts, gossip, seed 0"
    assert held["failed"] == {failed: "its ranks ended with [0, 1, 0, 0]"}
    assert failed in held["missing"]
    assert len(held["missing"]) == 7
    assert trained("--world-size", "4", "--seeds", "1")[1] == [failed]  # tried again


def test_no_longer_run_where_the_shorter_reached_the_target(trained):
    _, names, held = trained("--only", "fashion", "--seeds", "1", gossip=0.9)
    assert names == [
        f"Fashion-MNIST, LeNet, {hosts} hosts, {name}, seed 0"
        for hosts in (4, 8)
        for name in ("ddp", "gossip")
    ]
    assert held["rows"][0]["ratio_of_times_to_ddp"] == 0.9
    assert not [name for name in held["missing"] if name.startswith("Fashion")]


def test_one_seed_that_never_gets_there_leaves_no_ratio():
    def runs(*seconds):
        return [
            {"seed": seed, "seconds_to_ddp_accuracy": took} for seed, took in enumerate(seconds)
        ]

    assert bench.ratio([*runs(5.0, None), *runs(None, 8.0)], runs(10.0, 10.0)) == 0.65
    assert bench.ratio(runs(5.0, None), runs(10.0, 10.0)) is None
    assert bench.ratio([], runs(10.0)) is None


def test_results_are_there_after_every_run(trained, monkeypatch):
    done = []

    def report(seeds, folder, failed):
        done.append(len(list(folder.iterdir())))

    monkeypatch.setattr(bench, "report", report)
    with pytest.raises(FileNotFoundError):
        trained("--only", "fashion", "--world-size", "8", "--seeds", "1")
    assert done == [1, 2, 3, 3]


def test_other_settings_have_another_folder():
    slug = FASHION.slug("gossip", 0)
    assert slug == FASHION.slug("gossip", 0)
    others = [replace(FASHION, epochs=5), replace(FASHION, options=(*FASHION.options, "--lr", "1"))]
    assert slug not in {other.slug("gossip", 0) for other in others}


def test_nothing_chosen_is_told(trained, capsys):
    with pytest.raises(SystemExit):
        trained("--only", "imagenet")
    assert "choose among ['Fashion-MNIST, LeNet, 4 hosts'" in capsys.readouterr().err
