"""`gossipgrad watch`: the report of a run in a browser, while the run goes on."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from gossipgrad.trace import ReportServer


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """Show the report of a run, made anew every few seconds until the run has ended.

    It is served on this machine alone. Ctrl-C ends it, and leaves the run as it is.
    """

    run: tyro.conf.Positional[Path]
    """Folder that `gossipgrad train` writes to."""
    port: int = 0
    """Where to serve the page; 0: any port that is free."""
    every: int = 5
    """Seconds between two reloads."""
    open: bool = True
    """Show the page in a browser."""


def main(arguments: list[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    options = tyro.cli(WatchOptions, args=arguments, prog="gossipgrad watch")
    with ReportServer(options.run, port=options.port, every_seconds=options.every) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
