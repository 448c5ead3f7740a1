"""Writes the tables of docs/guarantees.md from `tests/guarantees.toml`.

A page has a table between `<!-- table: guarantees SECTION -->` and `<!-- end -->`.

    python -m benchmarks.tables
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
_MARKED = re.compile(r"(<!-- table: guarantees (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GUARANTEES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (ROOT / "tests" / "guarantees.toml").read_text(encoding="utf-8")
)
"""By section and promise, the tests that check it, as `room/test_file.py::test_name`."""


def table(section: str) -> str:
    """Promises of a section, each with links to the files of its tests."""
    head = "what happens" if section == "limits" else "promise"
    rows = [f"| {head} | tests |", "|---|---|"]
    for promise, tests in GUARANTEES[section].items():
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        links = [f"[{Path(file).stem[5:]}](../tests/{file})" for file in files]
        rows.append(f"| {promise} | {' '.join(links)} |")
    return "\n".join(rows)


def sections(text: str) -> list[str]:
    """Those that a page has."""
    return [found[2] for found in _MARKED.finditer(text)]


def filled(text: str) -> str:
    """The page with all its tables written once more."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
