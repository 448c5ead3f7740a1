"""The report of a run: one HTML page that needs nothing but itself."""

import base64
import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ._charts import Chart, charts
from ._figures import (
    OUTCOME_HEAD,
    RANK_HEAD,
    headline,
    notices,
    outcome_rows,
    rank_rows,
)
from ._html import Markup, disclosure, element, join, table
from ._json import dumps_for_script
from ._runs import Run, find_key, read_run
from ._timeline import timeline


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
    data = {"charts": [chart.payload() for chart in drawn], "timeline": steps}
    style, script = _asset("report.css"), _asset("report.js")
    return Template(_asset("report.html")).substitute(
        style=style,
        style_hash=_content_hash(style),
        script=script,
        script_hash=_content_hash(script),
        data=dumps_for_script(data),
        title=join([run.name]),
        subtitle=join([_subtitle(run)]),
        notices=join([element("p", text) for text in notices(run)]),
        cards=join([_card(card.label, card.value, card.note) for card in headline(run)]),
        charts=join([_figure(chart) for chart in drawn]),
        timeline=_timeline_section(steps),
        tables=_tables(run),
        details=_details(run),
    )


def _asset(name: str) -> str:
    return resources.files("gossipgrad.trace").joinpath("page", name).read_text(encoding="utf-8")


def _content_hash(text: str) -> str:
    """The name by which the page's own policy lets this script or style, and no other, apply."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _subtitle(run: Run) -> str:
    parts = [
        str(value)
        for key in ("model", "data", "optimizer")
        if isinstance(value := run.summary.get(key) or find_key(run.config, key), str)
    ]
    return ", ".join(parts)


def _card(label: str, value: str, note: str) -> Markup:
    return element(
        "div",
        element("dt", label),
        element("dd", element("span", value, class_="value"), element("span", note, class_="note")),
        class_="card",
    )


def _figure(chart: Chart) -> Markup:
    return element(
        "figure",
        element("figcaption", element("h2", chart.title), element("p", chart.description)),
        element("div", class_="chart", data_chart=chart.id),
        disclosure("Values as a table", table(chart.title, *chart.table())),
        class_="panel",
    )


def _timeline_section(steps: dict[str, Any] | None) -> Markup:
    if steps is None:
        return Markup()
    first = steps["firstStep"]
    what = "the run" if first is None else f"rank 0's steps {first} to {first + 2}"
    return element(
        "section",
        element("h2", "Timeline"),
        element("p", what),
        element("div", class_="timeline"),
        class_="panel wide",
    )


def _tables(run: Run) -> Markup:
    outcomes = outcome_rows(run)
    parts = [element("section", table("Ranks", RANK_HEAD, rank_rows(run)), class_="panel")]
    if outcomes:
        parts.append(element("section", table("Exchanges", OUTCOME_HEAD, outcomes), class_="panel"))
    return join(parts)


def _details(run: Run) -> Markup:
    return join(
        [
            disclosure(name, element("pre", json.dumps(value, indent=2, default=str)))
            for name, value in (("Configuration", run.config), ("Summary", run.summary))
            if value
        ]
    )
