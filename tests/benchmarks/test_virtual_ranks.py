"""What a killed run goes on from, and that what is published is never published away."""

import json
import os
from dataclasses import asdict

import pytest
import torch

from benchmarks import virtual_ranks as bench
from benchmarks._alone import BusyError, alone

CELL = bench.Cell("mlp", 4, "gossip", 0)


@pytest.fixture
def parts(monkeypatch):
    """Samples for four steps an epoch, of three epochs."""
    short = bench.Setting(global_batch=16, epochs=3, peak_lr=0.1, momentum=0.9, warmup_epochs=1)
    monkeypatch.setitem(bench.SETTINGS, "mlp", short)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1, 28, 28, generator=generator)
    part = bench.Part(x, torch.randint(10, (64,), generator=generator))
    return part, part


def test_a_run_that_was_killed_goes_on_from_its_last_epoch(parts, tmp_path, monkeypatch):
    whole = bench.run(CELL, tmp_path / "whole", *parts)
    trained = []
    train_epoch = bench.train_epoch

    def killed(ranks, cell, train, epoch):
        found = train_epoch(ranks, cell, train, epoch)  # the epoch is lost, not those before
        trained.append(epoch)
        if trained == [0, 1]:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(bench, "train_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(CELL, tmp_path, *parts)
    begun = tmp_path / f"{CELL.name}.pt"
    assert begun.exists()
    resumed = bench.run(CELL, tmp_path, *parts)
    assert trained == [0, 1, 1, 2]
    assert not begun.exists()
    for figures in (whole, resumed):
        assert len(figures["accuracy"]) == 3
        assert figures.pop("seconds") > 0
    assert resumed == whole
    again = bench.run(CELL, tmp_path, *parts)  # it is done: read
    assert again.pop("seconds") > 0
    assert again == whole
    assert len(trained) == 4


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Runs `main`; training is made up. The rows in the results, and those on the page."""
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "load", lambda device: (None, None))
    monkeypatch.setattr(bench.published, "fill_page", lambda: None)
    monkeypatch.setattr(bench.torch, "set_num_threads", lambda threads: None)
    pages = []
    monkeypatch.setattr(bench, "fill_page", pages.append)

    def run(cell, folder, train, test):
        figures = {"accuracy": [0.5 + 0.01 * cell.seed], "loss": [1.0], "seconds": 1.0}
        figures |= {"replica_accuracy": [0.5], "distances": [[i, 0.1] for i in range(4)]}
        path = folder / f"{cell.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        figures["setting"] = asdict(cell.setting)
        path.write_text(json.dumps({**asdict(cell), **figures}))
        return figures

    monkeypatch.setattr(bench, "run", run)

    def main(folder, *arguments):
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--folder", str(tmp_path / folder)])
        assert bench.main() == 0
        held = json.loads((tmp_path / "results" / "virtual_ranks.json").read_text())
        assert held["rows"] == pages.pop()
        assert held["cells_done"] == sum(len(row["seeds"]) for row in held["rows"])
        return {(row["model"], row["world_size"], row["strategy"]): row for row in held["rows"]}

    return main


def test_what_is_published_stays_where_fewer_seeds_are_here(publish, tmp_path, capsys):
    rows = publish("first", "--only", "mlp/8/allreduce", "mlp/8/gossip/")
    assert {key: row["seeds"] for key, row in rows.items()} == {
        ("mlp", 8, "allreduce"): [0, 1, 2],
        ("mlp", 8, "gossip"): [0, 1, 2],
    }
    results = tmp_path / "results" / "virtual_ranks.json"
    before = results.read_text()
    for arguments in (
        ("first", "--report", "--seeds", "1"),  # all is here: whatever --seeds says
        ("fresh", "--report"),
        ("fresh", "--only", "mlp/8/gossip/", "--seeds", "1"),
    ):
        publish(*arguments)
        assert results.read_text() == before, arguments
    assert "2 of 2 rows stay as published" in capsys.readouterr().out
    rows = publish("fresh", "--quick")  # seed 0 of more strategies
    assert rows["mlp", 8, "gossip"]["seeds"] == [0, 1, 2]
    assert rows["mlp", 8, "local"]["seeds"] == [0]
    # As many seeds, but nothing that they could be compared with.
    publish("alone", "--only", "mlp/8/gossip/")
    assert len(publish("alone", "--report")["mlp", 8, "gossip"]["minus_allreduce_points"]) == 3


OTHER = bench.Setting(global_batch=32, epochs=3, peak_lr=0.1, momentum=0.9, warmup_epochs=1)


def test_rows_of_other_settings_do_not_stand_beside_these(
    publish, parts, tmp_path, monkeypatch, capsys
):
    publish("first", "--only", "mlp/8/gossip/")
    bench.SETTINGS["mlp"] = OTHER
    trained = []
    monkeypatch.setattr(bench, "run", lambda cell, *others: trained.append(cell.name))
    for arguments in (["--only", "mlp/8"], ["--report"]):  # before anything is trained
        monkeypatch.setattr("sys.argv", ["bench", *arguments, "--folder", str(tmp_path / "first")])
        assert bench.main() == 2
        assert "0.json was trained with {'global_batch': 16, " in capsys.readouterr().err
    assert trained == []
    monkeypatch.setattr("sys.argv", ["bench", "--report", "--folder", str(tmp_path / "fresh")])
    assert bench.main() == 2
    assert "was trained with other settings, {" in capsys.readouterr().err


def test_what_was_done_or_begun_with_other_settings_is_refused(parts, tmp_path, monkeypatch):
    train_epoch = bench.train_epoch

    def killed(ranks, cell, train, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return train_epoch(ranks, cell, train, epoch)

    monkeypatch.setattr(bench, "train_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.run(CELL, tmp_path, *parts)
    begun = tmp_path / f"{CELL.name}.pt"
    held = begun.read_bytes()
    bench.SETTINGS["mlp"] = OTHER
    refused = r"0\.pt was trained with .*'global_batch': 16.* now they are .*'global_batch': 32"
    with pytest.raises(bench.OtherSettingsError, match=refused):
        bench.run(CELL, tmp_path, *parts)
    assert begun.read_bytes() == held


def test_cells_that_name_no_settings_are_of_those_published(publish, parts, tmp_path):
    publish("first", "--only", "mlp/8/gossip/")
    done = tmp_path / "first" / "mlp/8/gossip/0.json"
    content = json.loads(done.read_text())
    del content["setting"]
    done.write_text(json.dumps(content))
    short = bench.Cell("mlp", 8, "gossip", 0)
    assert bench.kept(short, tmp_path / "first") == content
    bench.SETTINGS["mlp"] = OTHER
    with pytest.raises(bench.OtherSettingsError, match=r"was trained with \{'global_batch': 16"):
        bench.kept(short, tmp_path / "first")
    (tmp_path / "results" / "virtual_ranks.json").unlink()
    with pytest.raises(bench.OtherSettingsError, match="with settings that it does not name"):
        bench.kept(short, tmp_path / "first")


def test_two_at_once_share_the_cells(parts, tmp_path, monkeypatch, capsys):
    lock = tmp_path / f"{CELL.name}.lock"
    with alone(lock):
        with pytest.raises(BusyError, match=r"another process holds .*/0\.lock: wait until it is"):
            bench.run(CELL, tmp_path, *parts)
        assert list(lock.parent.iterdir()) == [lock]
        monkeypatch.setattr(bench, "load", lambda device: parts)
        monkeypatch.setattr(bench, "report", lambda chosen, folder: "told")
        monkeypatch.setattr(bench, "cells", lambda seeds: [CELL, bench.Cell("mlp", 2, "local", 0)])
        monkeypatch.setattr("sys.argv", ["bench", "--folder", str(tmp_path)])
        assert bench.main() == 0
        busy, trained, _ = capsys.readouterr().out.splitlines()
        assert "left out: another process holds" in busy
        assert trained.startswith("mlp/2/local/0 ")
    assert not lock.exists()
    assert bench.run(CELL, tmp_path, *parts)["accuracy"]


def test_a_lock_that_its_owner_has_removed_is_none(tmp_path, monkeypatch):
    """Between opening the file and locking it, whoever had it may have removed it."""
    lock, there = tmp_path / "lock", []
    samestat = os.path.samestat

    def late(one, other):
        there.append(samestat(one, other))
        if len(there) == 1:
            lock.unlink()
            return False
        return there[-1]

    monkeypatch.setattr("os.path.samestat", late)
    with alone(lock), pytest.raises(BusyError), alone(lock):
        pass
    assert there == [True, True]
    assert not lock.exists()
