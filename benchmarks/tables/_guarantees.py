"""The tables of docs/guarantees.md, from `tests/guarantees.toml`."""

import tomllib
from pathlib import Path

from ._write import ROOT, register, table

GUARANTEES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (ROOT / "tests" / "guarantees.toml").read_text(encoding="utf-8")
)
"""By section and promise, the tests that check it, as `room/test_file.py::test_name`."""


def _section(name: str) -> str:
    rows = []
    for promise, tests in GUARANTEES[name].items():
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        links = [f"[{Path(file).stem[5:]}](../tests/{file})" for file in files]
        rows.append([promise, " ".join(links)])
    return table(["what happens" if name == "limits" else "promise", "tests"], rows)


for _name in GUARANTEES:
    register(f"guarantees {_name}")(lambda name=_name: _section(name))
