"""The figures beside published ones are those of the results."""

import importlib.util
import json
import re
from pathlib import Path

from benchmarks import published
from benchmarks._common import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "published.md"


def test_the_page_is_what_the_command_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    published.fill_page(page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.published"


def test_cells_that_are_marked_or_missing_are_told(tmp_path):
    def cell(contestant, p, seconds, marked=False):
        place = {"world_size": p, "rate_bits_per_second": 1e8, "profile": "resnet50"}
        measured = {"step_seconds_median": seconds, "efficiency": 0.4 / seconds}
        return {"contestant": contestant, "marked": marked, **place, **measured}

    cells = [cell("gossip", 4, 0.5), cell("ddp", 4, 1.0), cell("gossip", 8, 0.8)]
    cells += [cell("gossip", 16, 0.5), cell("ddp", 16, 2.0, marked=True)]
    (tmp_path / "network.json").write_text(json.dumps(cells))
    speed, accuracy = published.tables(tmp_path)
    assert "| 80 %; 50 %; 80 % |" in speed
    assert "| 50 % less; not measured; 75 % less (marked) |" in speed
    assert accuracy.count("| not measured |") == 3
    cells = [one | {"time_factor": 3.0, "size_factor": 0.03} for one in cells]
    (tmp_path / "network.json").write_text(json.dumps(cells))
    larger = [one | {"size_factor": 0.15, "step_seconds_median": 9.0} for one in cells]
    for others in ([], larger[:-1], larger):  # the most cells count, not those sorted last
        (tmp_path / "network.json").write_text(json.dumps(cells + others))
        speed, _ = published.tables(tmp_path)
        assert "| 50 % less; not measured; 75 % less (marked) |" in speed
        assert "100 Mbit/s, as 10 Gbit/s unscaled |" in speed
        assert "1000 Mbit/s, as 100 Gbit/s unscaled |" in speed


def test_results_name_commands_that_there_are():
    held = {file.name: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    commands = {name: one["command"].split() for name, one in held.items() if isinstance(one, dict)}
    assert len(commands) > 10
    for name, words in commands.items():
        assert words[:2] == ["python", "-m"], name
        assert importlib.util.find_spec(words[2]) is not None, (name, words[2])


def test_results_name_no_place_of_the_machine():
    path = re.compile(r"(?<![\w.~-])/(?:home|mnt|root|tmp|Users|var|work)/[^\s\"']*")
    found = {file.name: path.findall(file.read_text()) for file in RESULTS.glob("*.json")}
    assert not any(found.values()), found
    places = [f"/{first}/.cache/x.json" for first in ("root", "tmp")]
    assert path.findall(f'see "{places[0]}", or {places[1]}') == places
