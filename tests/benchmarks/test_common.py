"""What every benchmark keeps, writes and computes."""

import math

import pytest

from benchmarks._common import best_rate, once, paired


def test_a_cell_is_computed_once_and_never_with_other_settings(tmp_path):
    path = tmp_path / "folder" / "cell.json"
    assert once(path, {"rates": (1, 2)}, lambda: {"loss": 1.0}) == {"loss": 1.0}
    assert once(path, {"rates": (1, 2)}, lambda: {"loss": 2.0}) == {"loss": 1.0}
    with pytest.raises(ValueError, match="choose another --folder"):
        once(path, {"rates": (1, 3)}, lambda: {"loss": 2.0})


def test_differences_are_paired_by_seed():
    assert paired([2.0, 12.0, 22.0], [1.0, 11.0, 21.0]) == {"difference": 1.0, "interval": 0.0}
    found = paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert found == {"difference": 2.0, "interval": 2.484}  # 4.303 / sqrt(3)
    assert paired([1.0], [0.0]) == {"difference": 1.0, "interval": None}


def test_a_rate_is_searched_beyond_the_edges_and_never_diverges():
    rate, tried = best_rate((0.1, 0.2), lambda rate: math.nan if rate > 0.5 else -rate, 2.0)
    assert rate == 0.4
    assert set(tried) == {0.1, 0.2, 0.4, 0.8}
    rate, _ = best_rate((0.1, 0.2, 0.4), lambda rate: rate, 2.0)
    assert rate < 0.1
