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

from ._bars import bars
from ._charts import charts
from ._figures import (
    NOT_USED,
    OUTCOME_HEAD,
    RANK_HEAD,
    figure_rows,
    headline,
    notices,
    option_rows,
    outcome_rows,
    rank_rows,
    ranks_left_out,
)
from ._format import shortened
from ._html import Drawing, Markup, disclosure, element, join, table
from ._json import dumps_for_script
from ._mixing import INTRODUCTION as MIXING
from ._mixing import mixing, too_many_ranks
from ._runs import Run, find_key
from ._timeline import INTRODUCTION as TIMELINE
from ._timeline import timeline
from ._values import strategy

_OfRuns = list[tuple[Run, Drawing]]
_SCRIPTS = ("page.js", "charts.js", "bars.js", "mixing.js", "timeline.js")
_SUBTITLE_KEYS = ("model", "data", "optimizer")
_MAX_SPANS = 12_000
_LONG_VALUE = 12  # characters that fit into the width of a card


def page(runs: list[Run]) -> str:
    """The whole page; with more than one run it compares the others with the first."""
    alone = runs[0] if len(runs) == 1 else None
    drawn, stacked = charts(runs), bars(runs)
    mixings = _of_each(runs, mixing)
    max_spans = max(1000, _MAX_SPANS // len(runs))
    timelines = _of_each(runs, lambda run: timeline(run.trace, max_spans=max_spans))
    data = {
        "runs": [run.name for run in runs],
        "charts": [chart.payload for chart in drawn],
        "bars": [each.payload for each in stacked],
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
        charts=_drawings(drawn, "chart", first="panel first"),
        bars=_drawings(stacked, "bars"),
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


def _subtitle(run: Run) -> Markup:
    """Model, data, optimizer, workers, seed and date, as far as they are known."""
    named = (run.summary.get(key) or find_key(run.config, key) for key in _SUBTITLE_KEYS)
    parts = [name for name in named if isinstance(name, str)]
    parts.append(f"{run.world_size} worker{'s' * (run.world_size != 1)}")
    if type(seed := find_key(run.config, "seed")) is int:
        parts.append(f"seed {seed}")
    if run.started_seconds is not None:
        parts.append(f"{datetime.fromtimestamp(run.started_seconds):%Y-%m-%d %H:%M}")
    return element("p", ", ".join(parts), class_="subtitle")


def _run_list(runs: list[Run]) -> Markup:
    """The key to the curves: a button for each run that hides its own."""
    items = [
        element(
            "li",
            element(
                "button",
                _swatch(index),
                element("span", run.name),
                type="button",
                class_="run-toggle",
                data_run=str(index),
                aria_pressed="true",
                title="Show or hide the curves of this run",
            ),
            element("span", f"{strategy(run)}, {run.world_size} workers", class_="kicker"),
        )
        for index, run in enumerate(runs)
    ]
    return element("ul", *items, class_="runs")


def _swatch(index: int) -> Markup:
    line = element("path", class_=f"line mean run-{index % 8}", d="M0 5H28")
    return element("svg", line, viewBox="0 0 28 10", aria_hidden="true")


def _notices(runs: list[Run]) -> Markup:
    named = [(run, text) for run in runs for text in notices(run)]
    items = [
        element("li", text if len(runs) == 1 else f"{run.name}: {text}") for run, text in named
    ]
    return element("ul", *items, class_="notices") if items else Markup()


def _cards(run: Run) -> Markup:
    cards = []
    for card in headline(run):
        long = " long" * (len(card.value) > _LONG_VALUE)
        value = element("span", card.value, class_=f"value{long}")
        note = element("span", card.note, class_="note")
        cards.append(
            element("div", element("dt", card.label), element("dd", value, note), class_="card")
        )
    return element("dl", *cards, class_="cards")


def _comparison(runs: list[Run]) -> Markup:
    names = [run.name for run in runs]
    figures = [
        [name, *(join([value, _beside(ratio)]) for value, ratio in cells)]
        for name, *cells in figure_rows(runs)
    ]
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
    head = ["", *(join([name, _beside("")]) for name in names)]
    note = element("p", f"Beside each value: its ratio to that of {names[0]}.")
    return join(
        [
            element("section", table("Figures", head, figures), note, class_="panel"),
            element("section", options, *([rest] if same else []), class_="panel"),
        ]
    )


def _beside(text: str) -> Markup:
    return element("span", text, class_="ratio")


def _drawings(drawings: list[Drawing], kind: str, *, first: str = "panel") -> Markup:
    # The legend and the drawing are put in by the page's script.
    figures = [
        element(
            "figure",
            element("figcaption", element("h2", each.title), element("p", each.description)),
            element("div", class_=kind, **{f"data_{kind}": each.payload["id"]}),
            disclosure("Values as a table", each.table()),
            class_="panel" if index else first,
        )
        for index, each in enumerate(drawings)
    ]
    return element("div", *figures, class_="panels") if figures else Markup()


def _mixing(runs: list[Run], mixings: _OfRuns) -> Markup:
    left_out = [element("p", why, class_="missing") for run in runs if (why := too_many_ranks(run))]
    if not mixings and not left_out:
        return Markup()
    return element(
        "section",
        element("h2", "Who met whom"),
        *([element("p", MIXING)] if mixings else []),
        *left_out,
        *_one_by_one(runs, mixings, kind="mixing", caption="Exchanges taken, by rank"),
        class_="panel",
    )


def _timeline(runs: list[Run], timelines: _OfRuns) -> Markup:
    with_trace = [run for run, _ in timelines]
    without = [run.name for run in runs if run not in with_trace]
    parts = [element("p", TIMELINE)] if timelines else []
    if without:
        whose = f"of {', '.join(without)}" if len(runs) > 1 else "of this run"
        missing = (
            f"There are no spans {whose}: trace.json is missing or empty. "
            "`gossipgrad train --trace 50` records those of 50 steps."
        )
        parts.append(element("p", missing, class_="missing"))
    caption = "Milliseconds in the time first shown, by rank"
    return element(
        "section",
        element("h2", "Timeline"),
        *parts,
        *_one_by_one(runs, timelines, kind="timeline", caption=caption),
        class_="panel",
    )


def _one_by_one(runs: list[Run], found: _OfRuns, *, kind: str, caption: str) -> list[Markup]:
    """An element in which a script draws one run after another, and the tables of all of them."""
    if not found:
        return []
    several = len(runs) > 1
    tables: list[Markup] = []
    for run, each in found:
        if several:
            tables.append(element("p", f"{run.name}: {each.description}"))
        tables.append(each.table(_caption(caption, run, several)))
    return [
        element("p", found[0][1].description, class_=f"{kind}-about"),
        element("div", class_=kind),
        disclosure("Values as a table", *tables),
    ]


def _tables(run: Run, *, alone: bool) -> Markup:
    ranks = table(_caption("Ranks", run, not alone), RANK_HEAD, rank_rows(run), text_columns={1})
    if left_out := ranks_left_out(run):
        ranks = join([ranks, element("p", left_out)])
    tables = [ranks]
    outcomes = outcome_rows(run)
    if outcomes:
        caption = _caption("Exchanges", run, not alone)
        tables.append(table(caption, OUTCOME_HEAD, outcomes, text_columns={3}))
    if alone:
        return join(element("section", content, class_="panel") for content in tables)
    summary = element("h2", f"Ranks and exchanges of {run.name}")
    return element("section", disclosure(summary, *tables), class_="panel")


def _details(run: Run, *, alone: bool) -> Markup:
    return join(
        element(
            "section",
            disclosure(
                element("h2", _caption(name, run, not alone)),
                element("pre", json.dumps(shortened(value), indent=2, default=str)),
            ),
            class_="panel",
        )
        for name, value in (("Configuration", run.config), ("Summary", run.summary))
        if value
    )


def _caption(text: str, run: Run, several: bool) -> str:
    return f"{text}, {run.name}" if several else text
