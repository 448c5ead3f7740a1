"""The tables of `docs/plan.md`."""

import json
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS
from benchmarks._pages import DOCS, fill, table
from gossipgrad.cli._units import seconds_text

WORLD_SIZE = 16
SHOWN = {
    ("DistributedDataParallel", "dense"): "DDP",
    ("DistributedDataParallel", "fp16"): "DDP fp16",
    ("mg-wfbp", "dense"): "mg-wfbp",
    ("top-k, one group", "sparse"): "one group",
    ("lags, each tensor", "sparse"): "each tensor",
    ("omgs, published rule", "sparse"): "published rule",
}
"""Alternatives of the grid by name and method, and how their columns are headed."""


def fill_page(page: Path = DOCS / "plan.md", results: Path = RESULTS) -> None:
    """Writes the tables of the page anew, of what was found last."""
    found = json.loads((results / "plans.json").read_text())
    text = page.read_text()
    for rows in (rules(found), grid(found)):
        text = fill(text, rows)
    page.write_text(text)


def rules(found: dict[str, Any]) -> str:
    """How often, and by how much, each rule misses the best plan by the same method."""
    rows = [
        [
            f"`{name}`",
            f"{100 * figures['missed_share']:.1f} %",
            f"{figures['mean_ratio']:.3f}",
            f"{figures['worst_ratio']:.3f}",
        ]
        for name, figures in found["random"]["rules"].items()
    ]
    return table(["rule", "misses the best plan", "mean ratio", "worst ratio"], rows)


def grid(found: dict[str, Any]) -> str:
    """Steps of every network at one number of ranks."""
    rows = []
    for cell in found["grid"]:
        if cell["world_size"] != WORLD_SIZE:
            continue
        others = {(each["name"], each["method"]): each for each in cell["alternatives"]}
        rows.append(
            [
                cell["profile"],
                f"{cell['bandwidth']}/s",
                f"{cell['sparse_groups']} of {cell['groups']}",
                f"{100 * cell['sparse_share']:.0f} %",
                seconds_text(cell["step_seconds"]),
                *(seconds_text(others[key]["step_seconds"]) for key in SHOWN),
            ]
        )
    head = ["profile", "links", "groups compressed", "of elements", "plan", *SHOWN.values()]
    return table(head, rows)
