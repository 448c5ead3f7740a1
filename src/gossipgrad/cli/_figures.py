"""The figures of `gossipgrad plan` and `gossipgrad simulate`, and whether one can be drawn."""

import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gossipgrad.planning import Profile

from ._units import seconds_text

if TYPE_CHECKING:
    from ._plan_report import Comparison
    from ._simulate import Case

PLAN_FORMATS = (".svg", ".png", ".pdf", ".html")
_COLOURS = {"dense": "#4269d0", "fp16": "#97bbf5", "bf16": "#6cc5b0", "sparse": "#ff725c"}
_BACKWARD, _SELECT = "#b8b8b8", "#efb118"
_PANEL = {"height": 0.7, "edgecolor": "white", "linewidth": 0.4}


def text_lanes(found: "Comparison", width: int) -> list[str]:
    """Two lanes of letters, time to the right: what computes, and what travels.

    Backward is `-` and selection `+`; what travels is the first letter of its method, small and
    large in turns from group to group.
    """
    columns = max(10, width)
    length = found.best.finish_seconds or 1.0
    lanes = {"computes": [" "] * columns, "travels": [" "] * columns}
    for span in found.spans:
        letter = {"backward": "-", "select": "+"}.get(span.what)
        lane = "computes"
        if letter is None:
            lane, letter = "travels", found.best.groups[span.group].method[0]
            letter = letter.upper() if span.group % 2 else letter
        begin, end = (round(columns * at / length) for at in (span.start_seconds, span.end_seconds))
        lanes[lane][begin:end] = letter * (end - begin)
    return [f"{name:<9}|{''.join(lane)}|" for name, lane in lanes.items()]


def check_figure(path: Path, formats: Sequence[str]) -> None:
    """Raise unless a figure can be drawn into that file, before anything is computed.

    Raises:
        ValueError: matplotlib is missing, the format is unknown, or there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            "--figure needs matplotlib, which is not installed: pip install 'gossipgrad[plot]'"
        )
    if path.suffix.lower() not in formats:
        raise ValueError(f"--figure {path} must end in {', '.join(formats)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--figure {path}: there is no folder {path.parent}")


def draw_plan(found: "Comparison", title: str, path: Path) -> None:
    """The lanes above, and below how long a step takes with each alternative.

    Raises:
        ValueError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    others = [(f"{each.name} ({each.method})", each.plan) for each in found.alternatives]
    rows = [("this plan", found.best), *others]
    figure = Figure(figsize=(10, 2.6 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    above, below = figure.subplots(2, 1, height_ratios=[2, 0.3 * len(rows) + 0.6])
    used = {group.method for group in found.best.groups}
    for span in found.spans:
        at = 1e3 * span.start_seconds, 1e3 * (span.end_seconds - span.start_seconds)
        if span.what == "communicate":
            colour = _COLOURS[found.best.groups[span.group].method]
            above.barh(0, at[1], left=at[0], color=colour, **_PANEL)
        else:
            colour = _BACKWARD if span.what == "backward" else _SELECT
            above.barh(1, at[1], left=at[0], color=colour, **_PANEL)
    above.set_yticks([1, 0], ["computes", "travels"])
    above.set_xlabel("ms from the start of backward")
    named = {"backward": _BACKWARD, "selection": _SELECT} | {
        name: colour for name, colour in _COLOURS.items() if name in used
    }
    above.legend(
        handles=[Patch(color=colour, label=name) for name, colour in named.items()],
        fontsize=8,
        ncols=len(named),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )
    steps = [1e3 * found.step_seconds(each) for _, each in rows]
    colours = ["#4c9f70", *["#9aa5b1"] * len(others)]
    below.barh(range(len(rows)), steps, color=colours, height=0.7)
    below.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    below.invert_yaxis()
    below.set_xlabel("ms a step")
    below.bar_label(below.containers[0], [seconds_text(ms / 1e3) for ms in steps], fontsize=8)
    below.margins(x=0.12)
    try:
        if path.suffix.lower() != ".html":
            figure.savefig(path, dpi=120)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>\n"
        svg = drawn.getvalue()
        path.write_text(page + svg[svg.index("<svg") :], encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot draw into {path}: {error.strerror}") from error


SIMULATION_FORMATS = (".png", ".svg", ".pdf")
_MARKERS = "osD^vPX"


def draw_simulation(cases: "Sequence[Case]", profile: Profile, path: Path) -> None:
    """One panel a network, one line a strategy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    networks = list(dict.fromkeys(case.network for case in cases))
    figure = Figure(figsize=(4.6 * len(networks), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{profile.name} on {profile.device}, predicted")
    panels = figure.subplots(1, len(networks), sharey="row", squeeze=False)[0]
    for panel, network in zip(panels, networks, strict=True):
        here = [case.prediction for case in cases if case.network == network]
        worlds = sorted({found.world_size for found in here})
        panel.set(title=network, xlabel="ranks", xscale="log", ylim=(0, 1.04))
        panel.set_xticks(worlds, [f"{p:,}" for p in worlds])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        for number, name in enumerate(dict.fromkeys(found.strategy for found in here)):
            line = sorted((p.world_size, p.efficiency) for p in here if p.strategy == name)
            style = {"marker": _MARKERS[number % len(_MARKERS)], "label": name}
            panel.plot(*zip(*line, strict=True), **style)
    panels[0].set_ylabel("efficiency: compute / step")
    panels[-1].legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot draw into {path}: {error.strerror}") from error
