"""The page says what checkpoints cost as it was measured."""

import json
from pathlib import Path

from benchmarks import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def test_the_page_is_what_the_command_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    checkpoint.fill_page(page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.checkpoint"


def test_medians_are_told_in_milliseconds(tmp_path):
    row = {name: [0.001, 0.0123456, 2.0] for name in checkpoint.COLUMNS.values()}
    row |= {"parameters": 10_000_000, "write_seconds": 1.5}
    (tmp_path / "checkpoint.json").write_text(json.dumps({"rows": [row]}))
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    checkpoint.fill_page(page, tmp_path)
    assert "| 120 MB | 12.3 ms | 12.3 ms | 1,500 ms | 12.3 ms |" in page.read_text()
    assert page.read_text().count("not measured") == 2 * len(checkpoint.COLUMNS)


def test_every_way_is_timed(tmp_path):
    found = checkpoint.row(1_000, 1, tmp_path)
    assert found["state_bytes"] == 12_000 + 400
    assert set(checkpoint.COLUMNS.values()) <= set(found)
    assert found["step_alone_seconds"] > 0
