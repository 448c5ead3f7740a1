"""Time to all-reduce's accuracy in docs/gossipgrad.md, from `time_to_accuracy.json`."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._pages import DOCS, fill, table

PAGE = DOCS / "gossipgrad.md"
_HEAD = (
    "real training on shaped links",
    "hosts, links",
    "DDP",
    "gossip, as many epochs",
    "gossip, a quarter more",
    "gossip, twice as many",
    "time to DDP's accuracy",
)


def told(rows: Sequence[dict[str, Any]]) -> str:
    """A row a task: accuracy and seconds of each contestant, and gossip's time to DDP's accuracy.

    That is a share of DDP's time, the median over seeds with the least and the largest; an asterisk
    stands where other programs disturbed a run.
    """
    lines = []
    for row in rows:
        links = f"{row['world_size']}, {row['rate_bits_per_second'] / 1e6:g} Mbit/s"
        cells = [_ended(runs) for runs in row["runs"].values()]
        lines.append([row["task"], links, *cells, _share(row["shares_of_ddp_time"])])
    return table(_HEAD, lines)


def fill_page(rows: Sequence[dict[str, Any]], page: Path | None = None) -> None:
    """Writes the table in place of the one in the page.

    Raises:
        ValueError: The page has none.
    """
    page = page or PAGE
    page.write_text(fill(page.read_text(encoding="utf-8"), told(rows)), encoding="utf-8")


def _ended(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    mark = "*" if any(run["marked"] for run in runs) else ""
    accuracy = _spread([100 * run["accuracy"] for run in runs], statistics.fmean, "{:.1f}", " %")
    seconds = _spread([run["train_seconds"] for run in runs], statistics.median, "{:.0f}", " s")
    return f"{accuracy}, {seconds}{mark}{_seeds(len(runs))}"


def _share(by_seed: dict[str, float | None]) -> str:
    if not by_seed:
        return "not run"
    found = [share for share in by_seed.values() if share is not None]
    if not found:
        return "not reached"
    text = _spread(found, statistics.median, "{:.2f}")
    return (
        text if len(found) == len(by_seed) else f"{text}, in {len(found)} of {len(by_seed)} seeds"
    )


def _spread(
    values: Sequence[float],
    middle: Callable[[Sequence[float]], float],
    form: str,
    unit: str = "",
) -> str:
    """The middle of values, with the least and the largest."""
    low, high = (form.format(end(values)) for end in (min, max))
    text = form.format(middle(values)) + unit
    return text if low == high else f"{text} ({low} to {high})"


def _seeds(count: int) -> str:
    return "" if count == 3 else f", {count} seed{'s' * (count > 1)}"
