"""The figures in docs/sparsify_network.md, from `sparse_network.json`."""

import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._pages import DOCS, fill_between, table

from ._kinds import ALONE, KINDS, OPTIMAL
from ._selection import GAMMA, SELECTIONS, TORCH, cost_of

PAGE = DOCS / "sparsify_network.md"
WITHIN = 0.1  # what is said to be predicted
AT_MOST = 1.05  # times the best fixed one
_SHOWN_ELEMENTS = (1 << 16, 1 << 20, 1 << 24, 25_557_032, 1 << 26)
_PUBLISHED = (GAMMA, TORCH)  # whose selection sparsified SGD as published may have

Cell = dict[str, Any]
Figures = dict[str, Any]


def fill_page(figures: Figures, page: Path = PAGE) -> None:
    """Writes tables of all that was measured into the page.

    Raises:
        ValueError: The page has no place for it.
    """
    fill_between(page, "sparse_network", told(figures))


def told(figures: Figures) -> str:
    """Selection, a table a profile, and the sweep."""
    named = [cell for cell in figures["cells"] if not is_swept(cell)]
    of_sweep = {(c["profile"], c["density"]) for c in figures["cells"] if is_swept(c)}
    swept = [c for c in figures["cells"] if (c["profile"], c["density"]) in of_sweep]
    parts = [_selections(figures["selection"])]
    if not figures["cells"]:
        parts.append("No place has been measured yet: the table is what selection alone costs.")
    for cell in named:
        parts += [f"### {_title(cell)}", _summary(cell), _contestants(cell)]
    if swept:
        parts += ["### Bandwidth by workers", _swept_summary(swept), _sweep(swept)]
    return "\n\n".join(parts)


def is_swept(cell: Cell) -> bool:
    """Whether it is of the sweep, in which contestants that are far behind are left out."""
    return set(cell["contestants"]) != set(KINDS) and cell["density"] == 0.001


def best_fixed(cell: Cell) -> tuple[str, float]:
    """The fastest that a user could have fixed with our selection, and its seconds."""
    seconds = {
        name: of["step_seconds_median"]
        for name, of in cell["contestants"].items()
        if KINDS[name].fixed and of["step_seconds"]
    }
    best = min(seconds, key=lambda name: seconds[name])
    return best, seconds[best]


def error_of(of: dict[str, Any]) -> float | None:
    """By what share a step took longer than predicted; None where it was not measured."""
    if not of["step_seconds"]:
        return None
    return of["step_seconds_median"] / of["predicted_seconds"] - 1


def _title(cell: Cell) -> str:
    return (
        f"{cell['profile']}, {cell['world_size']} workers, {_rate(cell)}, "
        f"density {cell['density']:g}"
    )


def _rate(cell: Cell) -> str:
    rate = cell["rate_bits_per_second"]
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _summary(cell: Cell) -> str:
    of = cell["contestants"]
    ours = of[OPTIMAL]["step_seconds_median"]
    name, fixed = best_fixed(cell)
    said = f"Ours takes {ours / fixed:.2f} times what the best fixed one, {name}, takes"
    published = [
        f"{100 * (of[rival]['step_seconds_median'] / ours - 1):.0f} % faster than {rival}"
        for rival in (f"topk, {selection}" for selection in _PUBLISHED)
        if of.get(rival, {}).get("step_seconds")
    ]
    if published:
        said += f". Beside sparsified SGD as published it is {' and '.join(published)}"
    own = [n for n in of if n.startswith(f"{OPTIMAL}, ")]
    for each in own:
        selection = each.removeprefix(f"{OPTIMAL}, ")
        rivals = [of[f"{rule}, {selection}"] for rule in ("topk", "greedy")]
        if not all(rival["step_seconds"] for rival in (*rivals, of[each])):
            continue
        gains = [r["step_seconds_median"] / of[each]["step_seconds_median"] - 1 for r in rivals]
        said += (
            f". With the selection of {selection} the plan alone gains {100 * gains[0]:.0f} % over "
            f"topk and {100 * gains[1]:.0f} % over greedy"
        )
    return _wrapped(f"{said}. {_predicted([cell])}{_notes(cell)}")


def _predicted(cells: Iterable[Cell]) -> str:
    of = [one for cell in cells for name, one in cell["contestants"].items() if name != ALONE]
    errors = [error for one in of if (error := error_of(one)) is not None]
    fine = sum(abs(error) <= WITHIN for error in errors)
    return (
        f"{fine} of {len(errors)} steps are within {100 * WITHIN:g} % of what was predicted; the "
        f"median is {100 * statistics.median(map(abs, errors)):.1f} % off, the worst "
        f"{100 * max(errors, key=abs):+.0f} %."
    )


def _notes(cell: Cell) -> str:
    return f" {cell['refused'].capitalize()}." if cell["refused"] else ""


def _contestants(cell: Cell) -> str:
    ours = cell["contestants"][OPTIMAL]["step_seconds_median"]
    rows = []
    for name, of in cell["contestants"].items():
        error = error_of(of)
        groups = f"{of['groups']}" if of["groups"] else "-"
        if of["sparse_groups"] and of["sparse_groups"] != of["groups"]:
            groups += f", {of['sparse_groups']} sparse"
        measured, ratio = "-", "-"
        if error is not None:
            steps = of["step_seconds"]
            measured = _ms(of["step_seconds_median"], cell)
            if len(steps) > 1:
                measured += f" ({_ms(min(steps), cell)} to {_ms(max(steps), cell)})"
            measured += "*" if of["marks"] else ""
            ratio = f"{of['step_seconds_median'] / ours:.2f}"
        off = "-" if error is None else f"{100 * error:+.1f} %"
        rows.append([name, groups, _ms(of["predicted_seconds"], cell), measured, off, ratio])
    head = ["contestant", "groups", "predicted, ms", "measured, ms", "off by", "times ours"]
    return table(head, rows)


def _ms(seconds: float, cell: Cell) -> str:
    """At full size."""
    return f"{1e3 * seconds / cell['time_factor']:.0f}"


def _swept_summary(cells: list[Cell]) -> str:
    ratios = [_ratio(cell) for cell in cells]
    worse = sum(ratio > AT_MOST for ratio in ratios)
    left_out = sum(not of["step_seconds"] for cell in cells for of in cell["contestants"].values())
    return _wrapped(
        f"In each place: ours by the best fixed one (DDP in fp32 or fp16, wfbp, mg-wfbp, topk, "
        f"lags, greedy, all with our selection), which is named. It is above {AT_MOST:g} in "
        f"{worse} of {len(cells)} places, {max(ratios):.2f} at most. Who was predicted to take "
        f"over twice as long as the best was left out: {left_out} times in all. "
        + _predicted(cells)
    )


def _ratio(cell: Cell) -> float:
    return cell["contestants"][OPTIMAL]["step_seconds_median"] / best_fixed(cell)[1]


def _sweep(cells: list[Cell]) -> str:
    rates = sorted({cell["rate_bits_per_second"] for cell in cells})
    names = {cell["rate_bits_per_second"]: _rate(cell) for cell in cells}
    at = {(cell["world_size"], cell["rate_bits_per_second"]): cell for cell in cells}
    rows = []
    for world_size in sorted({cell["world_size"] for cell in cells}):
        row = [str(world_size)]
        for rate in rates:
            cell = at.get((world_size, rate))
            row.append("-" if cell is None else _place(cell))
        rows.append(row)
    return table(["workers, links", *(names[rate] for rate in rates)], rows)


def _place(cell: Cell) -> str:
    ours = cell["contestants"][OPTIMAL]
    marks = "*" if ours["marks"] else ""
    took = _ms(ours["step_seconds_median"], cell)
    return f"{_ratio(cell):.2f}{marks} of {best_fixed(cell)[0]} ({took} ms)"


def _selections(selection: dict[str, dict[str, Any]]) -> str:
    rows = []
    for by_density in selection.values():
        for density, curves in by_density.items():
            for name in SELECTIONS:
                cost = cost_of(curves[name])
                times = [f"{1e3 * float(cost(n)):.3g}" for n in _SHOWN_ELEMENTS]
                rows.append([name, density, *times])
    heads = [f"{n:,} elements, ms" for n in _SHOWN_ELEMENTS]
    return table(["selection", "density", *heads], rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)
