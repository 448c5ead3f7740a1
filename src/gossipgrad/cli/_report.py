"""`gossipgrad report`: the page of a run, written anew."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from gossipgrad.trace import write_report


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Write report.html of a run from the other files in its folder."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""


def main(arguments: list[str]) -> int:
    """Write the page and say where it is; returns the exit code."""
    options = tyro.cli(ReportOptions, args=arguments, prog="gossipgrad report")
    print(write_report(options.run))
    return 0
