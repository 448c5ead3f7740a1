"""The page says what checkpoints cost as it was measured."""

import json
import random
from pathlib import Path

from benchmarks import checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def test_the_page_is_what_the_command_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    checkpoint.fill_page(page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.checkpoint"


def test_medians_are_told_with_their_quartiles(tmp_path):
    row = {name: [0.001, 0.0123456, 2.0] for name in checkpoint.COLUMNS.values()}
    row |= {"parameters": 10_000_000, "write_seconds": [1.0, 1.5, 2.0], "load_average": 1.94}
    (tmp_path / "checkpoint.json").write_text(json.dumps({"rows": [row]}))
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    checkpoint.fill_page(page, tmp_path)
    one = "12.3 ms (6.67 to 1,006)"
    assert f"| 120 MB | {one} | {one} | 1,500 ms (1,250 to 1,750) | {one} |" in page.read_text()
    assert f"| {one} | 1.9 |" in page.read_text()
    assert page.read_text().count("not measured") == 2 * (len(checkpoint.COLUMNS) + 1)


def test_every_way_is_timed_in_turns(tmp_path, monkeypatch):
    turns = []
    timed = checkpoint.ways

    def watched(*arguments):
        return {
            name: lambda number, name=name, way=way: (turns.append((number, name)), way(number))[1]
            for name, way in timed(*arguments).items()
        }

    monkeypatch.setattr(checkpoint, "ways", watched)
    monkeypatch.setattr(checkpoint, "ALONE_STEPS", 2)
    found = checkpoint.row(1_000, 3, tmp_path, random.Random(0))
    assert found["state_bytes"] == 12_000 + 400
    assert set(checkpoint.COLUMNS.values()) <= set(found)
    assert all(len(found[name]) == 3 for name in checkpoint.COLUMNS.values())
    names = [[name for number, name in turns if number == turn] for turn in range(4)]
    assert len({tuple(one) for one in names}) == 4, "each turn in an order of its own"
    assert len({tuple(sorted(one)) for one in names}) == 1


def test_what_was_measured_once_is_its_own_quartiles():
    """As of steps beside a save, where the other saves were over before one could begin."""
    assert checkpoint.quartiles([0.25]) == [0.25] * 3
