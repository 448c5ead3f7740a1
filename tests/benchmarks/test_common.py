"""What every benchmark keeps and writes."""

import json

import pytest

from benchmarks._common import once, write


def test_a_cell_is_computed_once_and_never_with_other_settings(tmp_path):
    path = tmp_path / "folder" / "cell.json"
    assert once(path, {"rates": (1, 2)}, lambda: {"loss": 1.0}) == {"loss": 1.0}
    assert once(path, {"rates": (1, 2)}, lambda: {"loss": 2.0}) == {"loss": 1.0}
    with pytest.raises(ValueError, match="choose another --folder"):
        once(path, {"rates": (1, 3)}, lambda: {"loss": 2.0})


def test_raw_rows_lie_beside_the_figures(tmp_path):
    path = write("made_up", {"median": 2}, raw=[1, 2, 3], path=tmp_path / "made_up.json")
    figures = json.loads(path.read_text())
    assert figures["median"] == 2
    assert "raw" not in figures
    assert json.loads((tmp_path / "raw" / "made_up.json").read_text())["raw"] == [1, 2, 3]
