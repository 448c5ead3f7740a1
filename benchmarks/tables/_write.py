"""How tables are made, and filled into pages."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RESULTS = Path(__file__).parents[1] / "results"
_MARKED = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without its last newline.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("| --- ", "|---") for line in lines)


def filled(text: str) -> str:
    """A page with all its tables made anew.

    Raises:
        KeyError: It names a table that there is not.
    """
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def names(text: str) -> list[str]:
    """The tables that a page has."""
    return [found[2] for found in _MARKED.finditer(text)]


def results(name: str) -> Any:
    """What a benchmark has written."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def register(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Makes a function the maker of a table."""

    def keep(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = make
        return make

    return keep


def spread(
    values: Sequence[float],
    form: str,
    unit: str = "",
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> str:
    """The middle of values, with the least and the largest."""
    low, high = (form.format(end(values)) for end in (min, max))
    text = form.format(middle(values)) + unit
    return text if low == high else f"{text} ({low} to {high})"


def rate(row: dict[str, Any]) -> str:
    return f"{row['rate_bits_per_second'] / 1e6:g} Mbit/s"


def ended(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    marks = "*" * any(run["marked"] for run in runs)
    reached = statistics.fmean([100 * run["accuracy"] for run in runs])
    seconds = statistics.median(run["train_seconds"] for run in runs)
    seeds = "" if len(runs) == 3 else f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
    return f"{reached:.1f} %, {seconds:.0f} s{marks}{seeds}"
