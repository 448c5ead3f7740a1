"""The page says what selection costs as it was measured, and what is missing is measured alone."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import selection
from benchmarks._selection_page import fill_page

PAGE = Path(__file__).parents[2] / "docs" / "selection.md"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(selection, "SIZES", (2000, 3000))
    monkeypatch.setattr(selection, "DENSITIES", (0.01, 0.25))
    monkeypatch.setattr(selection, "REPEATS", (2, 2))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_page_is_what_the_command_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    fill_page(page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.selection"


def test_what_was_measured_is_kept(small, tmp_path):
    found = selection.load(tmp_path / "none.json")
    cells = [key for names in selection.RUNS.values() for key in names]
    for _, _ in zip(range(3), selection.measure(found, time.monotonic() + 60), strict=False):
        (tmp_path / "found.json").write_text(json.dumps(found))
    found = selection.load(tmp_path / "found.json")
    assert len([*selection.missing(found["cells"])]) == 2 * len(cells) - 3
    found["memory"] = {"2000": {}, "3000": {}}
    assert sum(1 for _ in selection.measure(found, time.monotonic() + 60)) == 2 * len(cells) - 3
    for cell in found["cells"]:
        for by_way in cell["densities"].values():
            assert set(by_way) == set(selection.WAYS)
            assert all(figures["repeats"] == 2 for figures in by_way.values())
    assert [*selection.measure(found, time.monotonic() + 60)] == []


def test_nothing_is_begun_past_the_deadline(small):
    found = {"cells": [], "memory": {}}
    assert [*selection.measure(found, time.monotonic())] == []
    assert found == {"cells": [], "memory": {}}


@pytest.mark.parametrize("name", selection.DISTRIBUTIONS)
def test_values_are_what_their_names_say(name):
    values = selection.DISTRIBUTIONS[name](200_000, torch.Generator().manual_seed(0))
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    assert values.mean().abs() < 0.05 * values.abs().mean()
    large = values.abs().max() / values.abs().mean()
    least, most = {
        "normal": (4, 7),
        "laplace": (9, 20),
        "student": (50, 5000),
        "accumulator": (6, 40),
    }[name]
    assert least < large < most
    zeros = (values == 0).float().mean()
    assert zeros == pytest.approx(0.2, abs=0.03) if name == "accumulator" else zeros < 0.001


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_call():
    command = [sys.executable, "-m", "benchmarks.selection", "--peaks", str(1 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    found, values = json.loads(done.stdout)["0.01"], 4 << 20
    assert found["torch.topk"] >= 3 * values, "the magnitudes, and pairs of value and index"
    assert found["np.argpartition"] >= 2 * values
    assert found["top_k"] < values
