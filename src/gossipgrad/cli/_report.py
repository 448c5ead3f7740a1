"""`gossipgrad report`: the page of a run, written anew, or of several side by side."""

import warnings
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gossipgrad.trace import write_report

from ._output import parse

_COMPARISON = Path("comparison.html")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Write the report of a run from the other files in its folder, or compare several runs."""

    runs: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    ]
    """Folders of runs. The others are measured against the first."""
    out: Path | None = None
    """File to write; None: report.html in the folder of the only run, comparison.html here for
    several."""
    open: bool = False
    """Show the page in a browser."""


def main(arguments: list[str]) -> int:
    """Write the page, say where it is, open it if wanted; returns the exit code."""
    options = parse(ReportOptions, arguments, "report")
    out = _COMPARISON if options.out is None and len(options.runs) > 1 else options.out
    report = write_report(*options.runs, out=out)
    print(report)
    if options.open and not webbrowser.open(report.resolve().as_uri()):
        warnings.warn(f"no browser could be started; open {report} yourself.", stacklevel=2)
    return 0
