"""The page of one run or of several: its sections, and the data that its scripts draw."""

import base64
import hashlib
import json
from collections.abc import Callable
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any

from ._curves import curves
from ._figures import strategy
from ._run import Run
from ._spans import mixing, timeline, too_many_ranks
from ._tables import (
    NOT_USED,
    exchange_table,
    figure_rows,
    headline,
    notices,
    option_rows,
    rank_table,
)
from ._text import (
    Drawing,
    Markup,
    disclosure,
    dumps_for_script,
    element,
    join,
    shortened,
    table,
)

_OfRuns = list[tuple[Run, Drawing]]
_SCRIPTS = ("page.js", "charts.js", "mixing.js", "timeline.js")
_MAX_SPANS = 12_000
_MIXING = (
    "How often each rank took in what another had sent, and how the first values of all ranks "
    "would be mixed if each delivered exchange had weight one half."
)
_TIMELINE = (
    "What each worker did, and what was on its way meanwhile. Drag to move, hold Ctrl and turn the "
    "wheel to zoom. Perfetto (ui.perfetto.dev) shows all of trace.json."
)
_NO_TRACE = (
    "There are no spans {}: trace.json is missing or empty. `gossipgrad train --trace 50` records "
    "those of 50 steps."
)


def page(runs: list[Run]) -> str:
    """The whole page; with more than one run it compares the others with the first."""
    alone = runs[0] if len(runs) == 1 else None
    drawn, mixings = curves(runs), _of_each(runs, mixing)
    max_spans = max(1000, _MAX_SPANS // len(runs))
    timelines = _of_each(runs, lambda run: timeline(run, max_spans=max_spans))
    data = {
        "runs": [run.name for run in runs],
        "charts": [chart.payload for chart in drawn],
        "mixings": [_payload_of(run, found) for run, found in mixings],
        "timelines": [_payload_of(run, found) for run, found in timelines],
    }
    style = _asset("report.css")
    script = "".join(_asset(name) for name in _SCRIPTS)
    return Template(_asset("report.html")).substitute(
        style=style,
        style_hash=_content_hash(style),
        script=script,
        script_hash=_content_hash(script),
        data=dumps_for_script(data),
        kicker="gossipgrad run report" if alone else "gossipgrad comparison",
        title=escape(alone.name if alone else " and ".join(run.name for run in runs)),
        heading=escape(alone.name if alone else f"{len(runs)} runs"),
        subtitle=_subtitle(alone) if alone else _run_list(runs),
        notices=_notices(runs),
        figures=_cards(alone) if alone else _comparison(runs),
        charts=_charts(drawn),
        mixing=_mixing(runs, mixings),
        timeline=_timeline(runs, timelines),
        tables=join(_tables(run, alone=alone is not None) for run in runs),
        details=join(_details(run, alone=alone is not None) for run in runs),
    )


def _of_each(runs: list[Run], find: Callable[[Run], Drawing | None]) -> _OfRuns:
    found = ((run, find(run)) for run in runs)
    return [(run, drawing) for run, drawing in found if drawing is not None]


def _payload_of(run: Run, drawing: Drawing) -> dict[str, Any]:
    return drawing.payload | {"run": run.name, "about": drawing.description}


def _asset(name: str) -> str:
    return resources.files("gossipgrad.report").joinpath("page", name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    """The name by which the page's own policy lets this script or style, and no other, apply."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _panel(*children: str) -> Markup:
    return element("section", *children, class_="panel")


def _subtitle(run: Run) -> Markup:
    """Model, data, optimizer, workers, seed and date, as far as they are known."""
    keys = ("model", "data", "optimizer")
    named = (run.summary.get(key) or run.config.get(key) for key in keys)
    parts = list(dict.fromkeys(name for name in named if isinstance(name, str)))
    parts.append(run.workers)
    if type(seed := run.config.get("seed")) is int:
        parts.append(f"seed {seed}")
    if run.started_seconds is not None:
        parts.append(f"{datetime.fromtimestamp(run.started_seconds):%Y-%m-%d %H:%M}")
    return element("p", ", ".join(parts), class_="subtitle")


def _run_list(runs: list[Run]) -> Markup:
    """The key to the curves: a button for each run that hides its own."""

    def toggle(index: int, run: Run) -> Markup:
        line = element("path", class_=f"line mean run-{index % 8}", d="M0 5H28")
        return element(
            "button",
            element("svg", line, viewBox="0 0 28 10", aria_hidden="true"),
            element("span", run.name),
            type="button",
            class_="run-toggle",
            data_run=str(index),
            aria_pressed="true",
            title="Show or hide the curves of this run",
        )

    items = [
        element(
            "li",
            toggle(index, run),
            element("span", f"{strategy(run)}, {run.workers}", class_="kicker"),
        )
        for index, run in enumerate(runs)
    ]
    return element("ul", *items, class_="runs")


def _notices(runs: list[Run]) -> Markup:
    named = [(run, text) for run in runs for text in notices(run)]
    items = [
        element("li", text if len(runs) == 1 else f"{run.name}: {text}") for run, text in named
    ]
    return element("ul", *items, class_="notices") if items else Markup()


def _cards(run: Run) -> Markup:
    def card(label: str, value: str, note: str) -> Markup:
        # A number is never broken in two: a long one is set smaller.
        size = "" if len(value) <= 8 else " long" if len(value) <= 13 else " text"
        shown = element("span", value, class_=f"value{size}")
        about = element("dd", shown, element("span", note, class_="note"))
        return element("div", element("dt", label), about, class_="card")

    return element("dl", *(card(*each) for each in headline(run)), class_="cards")


def _comparison(runs: list[Run]) -> Markup:
    def beside(text: str) -> Markup:
        return element("span", text, class_="ratio")

    names = [run.name for run in runs]
    figures = [
        [name, *(join([value, beside(ratio)]) for value, ratio in cells)]
        for name, *cells in figure_rows(runs)
    ]
    head = ["", *(join([name, beside("")]) for name in names)]
    note = element("p", f"Beside each value: its ratio to that of {names[0]}.")
    different, same = option_rows(runs)
    marked = [
        [name, first]
        + [value if value in (first, NOT_USED) else element("mark", value) for value in others]
        for name, first, *others in different
    ]
    options = element("p", "No option differs.")
    if marked:
        options = table("Options that differ", ["Option", *names], marked)
    rest = disclosure(
        f"{len(same)} options that are the same", table("Same options", ["Option", *names], same)
    )
    return join(
        [_panel(table("Figures", head, figures), note), _panel(options, *([rest] if same else []))]
    )


def _charts(drawings: list[Drawing]) -> Markup:
    # The legend and the drawing are put in by the page's script.
    figures = [
        element(
            "figure",
            element("figcaption", element("h2", each.title), element("p", each.description)),
            element("div", class_="chart", data_chart=each.payload["id"]),
            disclosure("Values as a table", table(each.title, each.head, each.rows)),
            class_="panel" if index else "panel first",
        )
        for index, each in enumerate(drawings)
    ]
    return element("div", *figures, class_="panels") if figures else Markup()


def _mixing(runs: list[Run], mixings: _OfRuns) -> Markup:
    left_out = [element("p", why, class_="missing") for run in runs if (why := too_many_ranks(run))]
    if not mixings and not left_out:
        return Markup()
    caption = "Exchanges taken, by rank"
    return _panel(
        element("h2", "Who met whom"),
        *([element("p", _MIXING)] if mixings else []),
        *left_out,
        *_one_by_one(runs, mixings, kind="mixing", caption=caption),
    )


def _timeline(runs: list[Run], timelines: _OfRuns) -> Markup:
    with_trace = [run for run, _ in timelines]
    without = [run.name for run in runs if run not in with_trace]
    parts = [element("p", _TIMELINE)] if timelines else []
    if without:
        whose = f"of {', '.join(without)}" if len(runs) > 1 else "of this run"
        parts.append(element("p", _NO_TRACE.format(whose), class_="missing"))
    caption = "Milliseconds in the time first shown, by rank"
    shown = _one_by_one(runs, timelines, kind="timeline", caption=caption)
    return _panel(element("h2", "Timeline"), *parts, *shown)


def _one_by_one(runs: list[Run], found: _OfRuns, *, kind: str, caption: str) -> list[Markup]:
    """An element in which a script draws one run after another, and the tables of all of them."""
    if not found:
        return []
    is_alone = len(runs) == 1
    tables: list[Markup] = []
    for run, each in found:
        if not is_alone:
            tables.append(element("p", f"{run.name}: {each.description}"))
        tables.append(table(_caption(caption, run, alone=is_alone), each.head, each.rows))
    return [
        element("p", found[0][1].description, class_=f"{kind}-about"),
        element("div", class_=kind),
        disclosure("Values as a table", *tables),
    ]


def _tables(run: Run, *, alone: bool) -> Markup:
    tables = [rank_table(run, _caption("Ranks", run, alone=alone))]
    tables += filter(None, [exchange_table(run, _caption("Exchanges", run, alone=alone))])
    if alone:
        return join(map(_panel, tables))
    return _panel(disclosure(element("h2", f"Ranks and exchanges of {run.name}"), *tables))


def _details(run: Run, *, alone: bool) -> Markup:
    return join(
        _panel(
            disclosure(
                element("h2", _caption(name, run, alone=alone)),
                element("pre", json.dumps(shortened(value), indent=2, default=str)),
            )
        )
        for name, value in (("Configuration", run.config), ("Summary", run.summary))
        if value
    )


def _caption(text: str, run: Run, *, alone: bool) -> str:
    return text if alone else f"{text}, {run.name}"
