"""The timeline of a plan, as letters and as a figure."""

import html
import io
from pathlib import Path

from ._output import new_figure, writing
from ._plan_report import Comparison
from ._units import seconds_text

FORMATS = (".svg", ".png", ".pdf", ".html")
_COLOURS = {"dense": "#4269d0", "fp16": "#97bbf5", "bf16": "#6cc5b0", "sparse": "#ff725c"}
_BACKWARD, _SELECT = "#b8b8b8", "#efb118"
_PANEL = {"height": 0.7, "edgecolor": "white", "linewidth": 0.4}


def text_lanes(found: Comparison, width: int) -> list[str]:
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


def draw(found: Comparison, title: str, path: Path) -> None:
    """The lanes above, and below how long a step takes with each alternative.

    Raises:
        ValueError: The file cannot be written.
    """
    from matplotlib.patches import Patch

    others = [(f"{each.name} ({each.method})", each.plan) for each in found.alternatives]
    rows = [("this plan", found.best), *others]
    figure = new_figure(title, (10, 2.6 + 0.3 * len(rows)))
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
    with writing("--figure", path):
        if path.suffix.lower() != ".html":
            figure.savefig(path, dpi=120)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>\n"
        svg = drawn.getvalue()
        path.write_text(page + svg[svg.index("<svg") :], encoding="utf-8")
