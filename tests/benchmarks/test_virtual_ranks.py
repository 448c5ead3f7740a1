"""Cells of virtual ranks, and the rows that are made of them."""

import torch

from benchmarks import virtual_ranks as bench


def test_a_cell_trains_alike_each_time(monkeypatch):
    monkeypatch.setattr(bench, "GLOBAL_BATCH", 16)
    monkeypatch.setattr(bench, "EPOCHS", 2)
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(64, 1, 28, 28, generator=generator), torch.arange(64) % 10
    cell = bench.Cell(4, "gossip", 0)
    first = bench.run(cell, part, part)
    assert len(first["accuracy"]) == 2
    assert bench.run(cell, part, part) == first


def test_a_run_that_diverged_counts_on_and_differences_are_paired_by_seed():
    found = [
        (bench.Cell(8, "allreduce", 0), {"accuracy": [0.5] * 19 + [0.75]}),
        (bench.Cell(8, "allreduce", 1), {"accuracy": [0.5] * 20}),
        (bench.Cell(8, "local", 1), {"accuracy": [0.25]}),
    ]
    rows = {row["strategy"]: row for row in bench.rows_of(found)}
    assert rows["local"]["accuracy_by_epoch_mean"] == [0.25] * 20
    assert rows["local"]["minus_allreduce_points"] == [-25.0]
    assert rows["allreduce"]["accuracy_mean"] == 0.625
