"""The report of a run: one HTML page that needs nothing but itself."""

import base64
import hashlib
import json
import os
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from ._charts import Chart, charts
from ._figures import (
    OUTCOME_HEAD,
    RANK_HEAD,
    Card,
    headline,
    notices,
    outcome_rows,
    rank_rows,
)
from ._html import Markup, disclosure, element, join, table
from ._json import dumps_for_script
from ._runs import Run, find_key, read_run
from ._timeline import Timeline, timeline

_SUBTITLE_KEYS = ("model", "data", "optimizer")


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run directory: the run's figures, curves and timeline.

    Reads `config.json`, `summary.json`, `metrics-rank*.jsonl` and `trace.json`, as far as they are
    there: of a run that was killed the report shows what there is and says what is missing. The
    page loads nothing, from the network or otherwise, and may be sent to others as it is.

    Local: reads and writes files only.

    Args:
        run_dir: The directory that `gossipgrad train` wrote to.

    Returns:
        The path of the report.

    Raises:
        ValueError: `run_dir` is no directory or holds nothing of a run.
    """
    report = Path(run_dir) / "report.html"
    page = _page(read_run(run_dir))
    partial = report.with_name(report.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(report)
    return report


def _page(run: Run) -> str:
    drawn = charts(run)
    steps = timeline(run.trace_events)
    data = {"charts": [chart.payload() for chart in drawn], "timeline": steps and steps.payload()}
    style = _asset("report.css")
    script = "".join(_asset(name) for name in ("page.js", "charts.js", "timeline.js"))
    return Template(_asset("report.html")).substitute(
        style=style,
        style_hash=_content_hash(style),
        script=script,
        script_hash=_content_hash(script),
        data=dumps_for_script(data),
        title=escape(run.name),
        subtitle=_subtitle(run),
        notices=_notices(run),
        cards=join(_card(card) for card in headline(run)),
        charts=_charts(drawn),
        timeline=_timeline(steps),
        tables=_tables(run),
        details=_details(run),
    )


def _asset(name: str) -> str:
    return resources.files("gossipgrad.trace").joinpath("page", name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    """The name by which the page's own policy lets this script or style, and no other, apply."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _subtitle(run: Run) -> Markup:
    """Model, data and optimizer, as far as the run names them."""
    named = (run.summary.get(key) or find_key(run.config, key) for key in _SUBTITLE_KEYS)
    return element(
        "p", ", ".join(name for name in named if isinstance(name, str)), class_="subtitle"
    )


def _notices(run: Run) -> Markup:
    items = [element("li", text) for text in notices(run)]
    return element("ul", *items, class_="notices") if items else Markup()


def _card(card: Card) -> Markup:
    value = element("span", card.value, class_="value")
    note = element("span", card.note, class_="note")
    return element("div", element("dt", card.label), element("dd", value, note), class_="card")


def _charts(drawn: list[Chart]) -> Markup:
    figures = []
    for position, chart in enumerate(drawn):
        figures.append(
            element(
                "figure",
                element("figcaption", element("h2", chart.title), element("p", chart.description)),
                element("div", class_="chart", data_chart=chart.id),
                disclosure("Values as a table", table(chart.title, *chart.table())),
                class_="panel first" if position == 0 else "panel",
            )
        )
    return element("div", *figures, class_="panels") if figures else Markup()


def _timeline(steps: Timeline | None) -> Markup:
    if steps is None:
        return Markup()
    caption = "Milliseconds in the time shown, by rank"
    return element(
        "section",
        element("h2", "Timeline"),
        element("p", steps.description),
        element("ul", class_="legend timeline-legend"),
        element("div", class_="timeline"),
        disclosure("Times as a table", table(caption, *steps.table())),
        class_="panel",
    )


def _tables(run: Run) -> Markup:
    tables = [table("Ranks", RANK_HEAD, rank_rows(run), text_columns={1})]
    outcomes = outcome_rows(run)
    if outcomes:
        tables.append(table("Exchanges", OUTCOME_HEAD, outcomes, text_columns={3}))
    return join(element("section", content, class_="panel") for content in tables)


def _details(run: Run) -> Markup:
    return join(
        element(
            "section",
            disclosure(
                element("h2", name), element("pre", json.dumps(value, indent=2, default=str))
            ),
            class_="panel",
        )
        for name, value in (("Configuration", run.config), ("Summary", run.summary))
        if value
    )
