"""One page of figures: step time by contestant, world size and rate, with the bounds."""

from pathlib import Path
from typing import Any

from ._cells import ANYONE

Cell = dict[str, Any]
_COLOURS = {4: "#9ecae1", 8: "#4292c6", 16: "#084594"}


def draw(cells: list[Cell], path: Path) -> Path:
    """Draws all measured cells into a PNG file: a panel a profile and rate.

    A bar is a median step with its range, a black line across it the second bound where a bare
    transfer stands for what is sent; bars of marked cells are hatched. The dashed line is the
    compute.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [c for c in cells if not c["contestant"].startswith("bare ")]
    places = sorted({_place(c) for c in shown if c["error"] is None})
    columns = max(1, min(2, len(places)))
    rows = max(1, -(-len(places) // columns))
    figure = Figure(figsize=(8 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, place in zip(panels, places, strict=False):
        _panel(axes, place, [c for c in shown if _place(c) == place])
    for axes in panels[len(places) :]:
        axes.set_axis_off()
    figure.suptitle(
        "Step time on shaped links. Black lines: max(compute, bare transfer); dashed: compute; "
        "hatched: marked, claims nothing"
    )
    figure.savefig(path, format="png", dpi=80)
    return path


def _place(cell: Cell) -> tuple[str, float, float, float]:
    return (
        *(cell["profile"], cell["time_factor"], cell["size_factor"]),
        cell["rate_bits_per_second"],
    )


def _panel(axes: Any, place: tuple[str, float, float, float], cells: list[Cell]) -> None:
    profile, times, sizes, rate = place
    cells = [cell for cell in cells if cell["contestant"] != ANYONE]
    names = list(dict.fromkeys(cell["contestant"] for cell in cells))
    world_sizes = sorted({cell["world_size"] for cell in cells})
    height = 0.8 / len(world_sizes)
    for cell in cells:
        at = names.index(cell["contestant"]) - 0.4
        at += (world_sizes.index(cell["world_size"]) + 0.5) * height
        if cell["error"] is not None:
            axes.text(0, at, f" {cell['error'][:60]}", va="center", fontsize=6, color="#a50f15")
            continue
        low, high = min(cell["step_seconds"]), max(cell["step_seconds"])
        axes.barh(
            at,
            cell["step_seconds_median"],
            height,
            color=_COLOURS.get(cell["world_size"], "#6a51a3"),
            hatch="////" if cell["marked"] else None,
            edgecolor="white",
            linewidth=0.4,
        )
        axes.plot([low, high], [at, at], color="#fd8d3c", linewidth=1)
        if (bound := cell["exchange_bound_seconds"]) is not None:
            ends = [at - height / 2, at + height / 2]
            axes.plot([bound, bound], ends, color="black", linewidth=1.2)
    axes.axvline(max(c["compute_seconds"] for c in cells), linestyle="--", color="#555555", lw=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step")
    axes.set_title(
        f"{profile}, times x {times:g}, sizes x {sizes:g}, {rate / 1e6:g} Mbit/s; p = "
        f"{', '.join(map(str, world_sizes))}",
        fontsize=9,
    )
