"""Which runs come first, what is kept of them, and what is written when some are missing."""

import json
import shutil
from dataclasses import replace

import pytest

from benchmarks import time_to_accuracy as bench
from benchmarks._alone import alone
from benchmarks.netlab import NetlabError

FASHION, CIFAR = bench.TASKS[:2]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs `main`; training is made up, and told."""
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    names = []
    reached = {"ddp": 0.8, "gossip": 0.7, "gossip, a quarter more epochs": 0.9}
    reached["gossip, twice the epochs"] = 0.95
    failing = ["CIFAR", "gossip"]

    def train(run, out, timeout_seconds):
        names.append(run.name)
        if run.name.startswith(failing[0]) and run.contestant == failing[1]:
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

    def main(*arguments, gossip=0.7, quarter=0.9, fails=("CIFAR", "gossip")):
        names.clear()
        failing[:] = fails
        reached.update({"gossip": gossip, bench.LONGER[0]: quarter})
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--folder", str(tmp_path / "runs")])
        code = bench.main()
        held = json.loads((tmp_path / "results" / "time_to_accuracy.json").read_text())
        return code, list(names), held

    return main


def test_a_seed_of_every_task_comes_before_the_next_and_longer_runs_last():
    runs = [(r.task, r.contestant, r.seed) for r in bench.order([FASHION, CIFAR], 2)]
    longer = [(task, name, 0) for name in bench.LONGER for task in (FASHION, CIFAR)]
    first = [(task, name, 0) for task in (FASHION, CIFAR) for name in ("ddp", "gossip")]
    assert runs[:8] == [*first, *longer]
    assert {seed for *_, seed in runs[8:]} == {1}
    assert len(runs) == 16


def test_what_is_missing_or_failed_is_named_and_done_runs_are_kept(trained):
    code, names, held = trained("--only", "fashion", "--world-size", "4", "--seeds", "1")
    assert code == 0
    done = ["ddp", "gossip", "gossip, a quarter more epochs"]
    assert names == [f"Fashion-MNIST, LeNet, 4 hosts, {name}, seed 0" for name in done]
    assert len(held["rows"]) == 4
    assert len(held["missing"]) == 22  # of 24: whatever is to be done now; longer ones may follow
    assert "busy throughout by design" in held["processors"]
    row = held["rows"][0]
    assert row["ratio_of_times_to_ddp"] == 0.9
    assert row["runs"]["gossip"][0]["seconds_to_ddp_accuracy"] is None
    assert row["runs"][bench.LONGER[0]][0]["seconds_to_ddp_accuracy"] == pytest.approx(18.0)
    assert row["runs"]["gossip"][0]["cpu_busy"] == 0.9
    assert held["rows"][1]["ratio_of_times_to_ddp"] is None
    code, names, held = trained("--world-size", "4", "--seeds", "1")
    assert code == 1
    assert all(name.startswith("CIFAR") for name in names)
    failed = "CIFAR-10 small, ResNet-20, 4 hosts, gossip, seed 0"
    assert held["failed"] == {failed: "its ranks ended with [0, 1, 0, 0]"}
    assert failed in held["missing"]
    assert len(held["missing"]) == 21
    assert trained("--world-size", "4", "--seeds", "1")[1] == [failed]  # tried again


def test_no_longer_run_where_the_shorter_reached_the_target(trained):
    _, names, held = trained("--only", "fashion", "--seeds", "1", gossip=0.9)
    assert names == [
        f"Fashion-MNIST, LeNet, {hosts} hosts, {name}, seed 0"
        for hosts in (4, 8)
        for name in ("ddp", "gossip")
    ]
    assert held["rows"][0]["ratio_of_times_to_ddp"] == 0.9
    missing = [name for name in held["missing"] if name.startswith("Fashion")]
    assert not [name for name in missing if name.endswith("seed 0")]


def test_twice_the_epochs_only_where_a_quarter_more_were_too_few(trained):
    words = ["--only", "cifar", "--world-size", "8", "--seeds", "1"]
    _, names, held = trained(*words, quarter=0.75, fails=("", ""))
    done = [f"{name}, seed 0" for name in bench.CONTESTANTS]
    assert [name.split(", ", 3)[3] for name in names] == done
    assert held["rows"][3]["shares_of_ddp_time"] == {"0": 0.864}


def test_gossip_has_no_target_where_ddp_failed(trained):
    code, names, held = trained("--only", "fashion", "--seeds", "2", fails=("Fashion", "ddp"))
    assert code == 1
    assert len(names) == 8, "longer runs wait for a target"
    assert len(held["failed"]) == 4
    row = held["rows"][0]
    assert row["runs"]["ddp"] == []
    assert [run["target"] for run in row["runs"]["gossip"]] == [None, None]
    assert row["ratio_of_times_to_ddp"] is None
    # Of the seeds that are complete there is one.
    _, names, held = trained("--only", "fashion", "--seeds", "1", gossip=0.9)
    assert [name.split(", ")[3] for name in names] == ["ddp", "ddp", "gossip", "gossip"]
    assert held["rows"][0]["ratio_of_times_to_ddp"] == 0.9


def test_what_is_published_stays_where_fewer_runs_are_here(trained, tmp_path, capsys):
    _, _, published = trained("--only", "fashion", "--world-size", "4")
    assert len(published["rows"][0]["runs"]["ddp"]) == 3
    assert (
        trained("--only", "fashion", "--world-size", "4", "--seeds", "1")[2]["rows"]
        == (published["rows"])
    )
    shutil.rmtree(tmp_path / "runs")
    _, names, held = trained("--only", "fashion", "--world-size", "8", "--seeds", "1")
    assert len(names) == 3
    assert held["rows"] == published["rows"]
    out = capsys.readouterr().out
    assert "stays as it is: 9 of its runs are not in" in out
    here = tmp_path / "runs" / "time_to_accuracy.json"
    assert out.endswith(f"{here}\n")
    assert len(json.loads(here.read_text())["rows"][2]["runs"]["ddp"]) == 1


class Refused:
    """A network that does not come up, or whose links do not hold their rates."""

    def __init__(self, where, hosts, rate_bits_per_second):
        self.where = where

    def _may_fail(self, here):
        if here == self.where:
            raise NetlabError(f"{here}: it cannot")

    def __enter__(self):
        self._may_fail("entering")
        return self

    def __exit__(self, *_):
        pass

    hosts = 4

    def verify(self):
        self._may_fail("verify")


@pytest.mark.parametrize("where", ["entering", "verify"])
def test_links_that_fail_fail_their_run_and_no_laboratory_ends_all(
    where, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "Network", lambda **options: Refused(where, **options))
    words = ["--only", "fashion", "--world-size", "4", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["bench", *words, "--folder", str(tmp_path / "runs")])
    code = bench.main()
    said = capsys.readouterr()
    if where == "entering":
        assert code == 2
        assert said.err == "no laboratory here: entering: it cannot\n"
        return
    assert code == 1
    held = json.loads((tmp_path / "results" / "time_to_accuracy.json").read_text())
    assert list(held["failed"].values()) == ["verify: it cannot"] * 2


def test_one_seed_that_never_gets_there_leaves_no_ratio():
    def runs(*seconds):
        return [
            {"seed": seed, "seconds_to_ddp_accuracy": took} for seed, took in enumerate(seconds)
        ]

    def ratio(own, ddp):
        return bench.ratio(list(bench.shares(own, ddp).values()))

    assert ratio([*runs(5.0, None), *runs(None, 8.0)], runs(10.0, 10.0)) == 0.65
    assert ratio(runs(5.0, None), runs(10.0, 10.0)) is None
    assert ratio([], runs(10.0)) is None
    assert bench.shares(runs(5.0, None, 7.0), runs(10.0, 10.0)) == {"0": 0.5, "1": None}


def test_results_are_there_after_every_run(trained, monkeypatch):
    done = []

    def report(seeds, folder, failed):
        done.append(len([out for out in folder.iterdir() if out.is_dir()]))

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
    with pytest.raises(SystemExit):
        trained("--minutes", "0")
    assert "--minutes 0: leave it out for no limit" in capsys.readouterr().err


def test_a_second_one_on_a_folder_is_refused(trained, tmp_path, capsys):
    trained("--only", "fashion", "--world-size", "4", "--seeds", "1")
    with alone(tmp_path / "runs" / "lock"):
        code, names, _ = trained("--only", "fashion", "--world-size", "8")
    assert (code, names) == (2, [])
    assert "another process holds" in capsys.readouterr().err
