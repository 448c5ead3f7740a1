"""Predicted beside measured step times in docs/simulate_time.md, from `simulate_check.json`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._pages import DOCS, fill_between, table

PAGE = DOCS / "simulate_time.md"
_SOURCES = {"from_rate": "the rate of the links alone", "from_probe": "a probe of the network"}


def told(figures: dict[str, Any]) -> str:
    """How far off the model was, and a table a profile and rate."""
    goal, rows = figures["goal"], figures["rows"]
    counts = "; ".join(
        f"from {source}: {_count(figures['summary'][key], goal)}"
        for key, source in _SOURCES.items()
    )
    text = (
        f"Held against the cells of `python -m benchmarks.network`, {counts}. The tables have "
        "milliseconds a step: measured / predicted from the rate / from a probe, bold where "
        f"it is more than {100 * goal:g} % off. A cell with an asterisk is one in which the "
        "laboratory was no fair stand-in for hosts of their own (its `marks`): it counts for "
        "nothing."
    )
    if figures["not_modelled"]:
        names = ", ".join(f"`{name}`" for name in figures["not_modelled"])
        text += f" Measured there and not modelled: {names}."
    without = _not_probed(rows)
    if without:
        text += f" Where a `-` stands, at {', '.join(without)}, no probe came about: what would "
        text += "come out there from one is not known, and not in the count."
    paragraphs = [text, _assumed(figures["start_ups"])]
    return "\n\n".join(
        [
            *(textwrap.fill(one, 100, break_on_hyphens=False) for one in paragraphs),
            *(_table(rows, place, goal) for place in dict.fromkeys(map(_place, rows))),
        ]
    )


def fill_page(figures: dict[str, Any], page: Path | None = None) -> None:
    """Writes it between its two marks in the page.

    Raises:
        ValueError: The page does not have them.
    """
    fill_between(page or PAGE, "simulate_check", told(figures))


def _count(summary: dict[str, Any], goal: float) -> str:
    if not summary["cells"]:
        return "nothing was predicted"
    return (
        f"{summary['within_goal']} of {summary['cells']} step times are predicted within "
        f"{100 * goal:g} % (median {100 * summary['median_error']:.1f} %, largest "
        f"{100 * summary['largest_error']:.0f} %)"
    )


def _assumed(start_ups: dict[str, Any]) -> str:
    tried = [f"{1e3 * seconds:g}" for seconds in start_ups["hops_tried_seconds"]]
    return (
        f"From the rate alone, a message is taken to start up in "
        f"{1e3 * start_ups['message_seconds']:g} ms, and a hop of Gloo's ring in "
        f"{1e3 * start_ups['hop_seconds']:g} ms. The hop's was chosen among "
        f"{', '.join(tried[:-1])} and {tried[-1]} ms by these very cells: their count says how "
        "well the model fits them, and not what other cells would come to. No other figure was set "
        "by them, and the probes know nothing of them."
    )


def _not_probed(rows: Sequence[dict]) -> list[str]:
    """Where there is no probe, though elsewhere there is."""
    if all(row["from_probe_seconds"] is None for row in rows):
        return []
    return list(
        dict.fromkeys(
            f"{row['world_size']} hosts at {row['rate_bits_per_second'] / 1e6:g} Mbit/s"
            for row in rows
            if row["from_probe_seconds"] is None
        )
    )


def _place(row: dict) -> tuple[str, float, float, float]:
    return (
        *(row["profile"], row["time_factor"], row["size_factor"]),
        row["rate_bits_per_second"],
    )


def _table(rows: Sequence[dict], place: tuple[str, float, float, float], goal: float) -> str:
    profile, times, sizes, rate = place
    here = [row for row in rows if _place(row) == place]
    worlds = sorted({row["world_size"] for row in here})
    by_place = {(row["contestant"], row["world_size"]): row for row in here}
    return table(
        [
            f"{profile} (times x {times:g}, sizes x {sizes:g}), {rate / 1e6:g} Mbit/s",
            *(f"{p} hosts" for p in worlds),
        ],
        [
            [contestant, *(_cell(by_place.get((contestant, p)), goal) for p in worlds)]
            for contestant in dict.fromkeys(row["contestant"] for row in here)
        ],
    )


def _cell(row: dict | None, goal: float) -> str:
    if row is None:
        return ""
    parts = [f"{1e3 * row['measured_seconds']:.0f}" + r"\*" * row["marked"]]
    for key in _SOURCES:
        error, seconds = row[f"{key}_error"], row[f"{key}_seconds"]
        if seconds is None:
            parts.append("-")
        else:
            bold = "**" * (abs(error) > goal)
            parts.append(f"{bold}{1e3 * seconds:.0f}{bold}")
    return " / ".join(parts)
