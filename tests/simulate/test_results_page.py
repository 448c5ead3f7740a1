"""The figures on the page are those that were measured, and its sentences hold for them."""

import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks._pages import fill, table
from benchmarks._virtual_ranks_page import fill_page, tables
from benchmarks._virtual_ranks_table import table as rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulate.md").read_text()
ROWS = json.loads((ROOT / "benchmarks/results/virtual_ranks.json").read_text())["rows"]


def measured(model, world_size, strategy, **factors):
    wanted = {"lr_factor": 1, "epochs_factor": 1, "batch_factor": 1, **factors}
    wanted |= {"model": model, "world_size": world_size, "strategy": strategy}
    (row,) = [row for row in ROWS if all(row[key] == value for key, value in wanted.items())]
    return row


def behind(world_size, **factors):
    return -fmean(measured("mlp", world_size, "gossip", **factors)["minus_allreduce_points"])


def compared(row, other):
    return [mine - its for mine, its in zip(row["accuracy"], other["accuracy"], strict=True)]


def test_tables_are_what_the_benchmark_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    fill_page(ROWS, page)
    assert page.read_text() == PAGE, "run python -m benchmarks.virtual_ranks --report"
    assert "88." in tables(ROWS)[0]
    with pytest.raises(ValueError, match="the page has no table that begins with"):
        fill("No table.\n", table(["a", "b"], []))


def test_sentences_hold():
    assert behind(8) < behind(32) < behind(128)
    assert behind(128) > 0.5
    assert behind(128, epochs_factor=3) < behind(128) / 2
    for row in (row for row in ROWS if row["model"] == "mlp"):
        plain = all(row[key] == 1 for key in row if key.endswith("_factor"))
        gossips = row["strategy"].startswith("gossip") or row["strategy"] == "every-log-p"
        if plain and row["world_size"] == 128 and gossips:
            assert row["minus_allreduce_points_mean"] < -0.5, row["strategy"]
    average = "local, state, average every"
    lost = [
        -fmean(measured("mlp", 128, f"{average} {every}")["minus_allreduce_points"])
        for every in (1, 2, 4)
    ]
    assert max(lost[:2]) < 0.2
    assert 0.5 < lost[2] < behind(128)
    for model in ("mlp", "lenet"):
        assert max(measured(model, 128, "local")["accuracy"]) < 0.2, "it diverges"
    assert all(
        p > 0
        for p in compared(measured("mlp", 128, "gossip, state"), measured("mlp", 128, "gossip"))
    )
    lenet = [measured("lenet", p, "allreduce")["accuracy"] for p in (1, 8, 32, 128)]
    of_seeds = [[one for one in each if one > 0.2] for each in zip(*lenet, strict=False)]
    assert max(max(of) - min(of) for of in of_seeds if of) > 0.03, "rounding alone moves it"


def result(seed, accuracy, loss, **others):
    distances = [[step, 2.0 * step] for step in range(4 * len(accuracy))]
    return {
        "model": "mlp",
        "world_size": 8,
        "strategy": "local",
        "lr_factor": 1.0,
        "epochs_factor": 1,
        "batch_factor": 1,
        "seed": seed,
        "accuracy": accuracy,
        "loss": loss,
        "replica_accuracy": [0.5],
        "distances": distances,
        "seconds": 1.0,
        **others,
    }


def test_seeds_that_diverge_at_different_epochs_make_a_row():
    distances = [[step, math.nan] for step in range(8)]
    (row,) = rows_of(
        [
            result(2, [0.25, 0.125], [1.0, math.nan], distances=distances),
            result(0, [0.25, 0.5, 0.75], [2.0, 1.0, 0.5]),
            result(1, [0.125], [math.inf]),
        ]
    )
    assert row["seeds"] == [0, 1, 2]
    assert row["accuracy"] == [0.75, 0.125, 0.125]
    assert row["diverged_at_epoch"] == [None, 1, 2]
    assert row["accuracy_by_epoch_mean"] == [round(0.625 / 3, 5), 0.25, round(1 / 3, 5)]
    assert row["consensus_distance_by_epoch"] == [[6.0, 14.0, 22.0], [6.0], [None, None]]
    assert row["loss"] == [0.5, None, None]
    assert "NaN" not in json.dumps(row)


def test_local_replicas_have_their_own_accuracy_and_seeds_that_diverged_are_told():
    whole, short = [0.5] * 20, [0.5] * 5
    rows = rows_of(
        [
            result(0, whole, [1.0], world_size=128, replica_accuracy=[0.8, 0.9]),
            result(1, short, [math.nan], world_size=128, replica_accuracy=[0.1, 0.2]),
        ]
    )
    rows[0]["consensus_distance_by_epoch"][1][4] = None
    accuracies, _, _, distances, _ = tables(rows)
    assert "| local | - | - | - | 50.00 (2) |" in accuracies
    assert "| local, mean of the replicas themselves | - | - | - | 50.00 (2) |" in accuracies
    one = " | ".join(f"{2 * (4 * epoch - 1)} (1 diverged)" for epoch in (5, 10))
    assert f"| local | 128 | 2 | 6 | 14 | {one} | " in distances
    rows[0]["consensus_distance_by_epoch"][0][19] = None
    assert " | diverged |" in tables(rows)[3]
