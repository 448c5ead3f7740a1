"""`gossipgrad report`: the page of a run, written or served, or of several side by side."""

import warnings
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gossipgrad.report import ReportServer, write_report

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
    serve: bool = False
    """Serve the page of one run on this machine alone, with what the run has written by then, and
    write no file; the page reloads itself until the run has ended. Ctrl-C ends the serving, and
    leaves the run as it is."""
    port: int = 0
    """Of the page that is served; 0: any that is free."""
    every: int = 5
    """Seconds between two reloads of the page that is served."""


def main(arguments: list[str]) -> int:
    """Write the page or serve it, say where it is, open it if wanted; returns the exit code."""
    options = parse(ReportOptions, arguments, "report")
    if options.serve:
        return _serve(options)
    out = _COMPARISON if options.out is None and len(options.runs) > 1 else options.out
    report = write_report(*options.runs, out=out)
    print(report)
    if options.open:
        _open(report.resolve().as_uri())
    return 0


def _serve(options: ReportOptions) -> int:
    if len(options.runs) != 1 or options.out is not None:
        raise ValueError("--serve shows the page of one run: give one folder, and no --out")
    run = options.runs[0]
    if not run.is_dir():
        raise ValueError(f"{run} is no folder; pass the folder that `gossipgrad train` writes to")
    with ReportServer(run, port=options.port, every_seconds=options.every) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        if options.open:
            _open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _open(address: str) -> None:
    if not webbrowser.open(address):
        warnings.warn(f"no browser could be started; open {address} yourself.", stacklevel=2)
