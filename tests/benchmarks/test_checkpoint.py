"""The page says what checkpoints cost as it was measured."""

import json
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]


def test_the_table_of_costs_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())["rows"]
    page = (ROOT / "docs/checkpoint.md").read_text()
    lines = page.split("| state | `Saver.save`")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == len(measured)
    for line, row in zip(lines, measured, strict=True):
        seconds = (
            row["held_seconds"],
            [row["held_first_seconds"]],
            row["torch_save_seconds"],
            row["torch_save_fsync_seconds"],
            row["save_seconds"],
            [row["write_seconds"]],
        )
        assert [cell.strip() for cell in line.strip("|").split("|")] == [
            f"{row['state_bytes'] / 1e6:.0f} MB",
            *(f"{1e3 * median(found):,.3g} ms" for found in seconds),
        ]


def test_a_copy_in_memory_is_shorter_than_a_file():
    measured = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())["rows"]
    for row in measured:
        assert median(row["held_seconds"]) < median(row["torch_save_seconds"])
