"""A run of four ranks as the command left it, one of them killed; and copies that differ."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.report import write_report
from support.html_page import Page

GOLDEN = Path(__file__).with_name("golden")
Change = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the run, as it was recorded."""
    return GOLDEN


@pytest.fixture(scope="session")
def copy_run() -> Callable[..., Path]:
    """Copies the run into a folder and changes what its files hold."""

    def copy(
        folder: Path,
        *,
        config: dict[str, Any] | None = None,
        summary: dict[str, Any] | None = None,
        record: Change = lambda record: record,
        event: Change = lambda event: event,
        without: str = "",
    ) -> Path:
        """Values for config.json and summary.json; changes of each line of metrics and each event
        of the trace, None to leave it out; a pattern of files to leave out."""
        shutil.copytree(GOLDEN, folder)
        for path in folder.glob(without) if without else ():
            path.unlink()
        for name, values in (("config.json", config), ("summary.json", summary)):
            if values:
                before = json.loads((folder / name).read_text())
                (folder / name).write_text(json.dumps(before | values))
        for path in folder.glob("metrics-rank*.jsonl"):
            lines = map(record, map(json.loads, path.read_text().splitlines()))
            path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
        if (folder / "trace.json").exists():
            events = map(event, json.loads((folder / "trace.json").read_text())["traceEvents"])
            kept = [one for one in events if one is not None]
            (folder / "trace.json").write_text(json.dumps({"traceEvents": kept}))
        return folder

    return copy


@pytest.fixture
def report(tmp_path) -> Callable[..., Page]:
    """Writes the page of runs and reads it."""

    def read(*runs: Path) -> Page:
        return Page(write_report(*runs, out=tmp_path / "page.html").read_text(encoding="utf-8"))

    return read
