"""`gossipgrad simulate`: step time and efficiency at any scale, before anything is rented."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from gossipgrad.planning import Profile

from ._simulate_cases import Case, simulate
from ._simulate_options import SimulateOptions, check
from ._units import seconds_text


def main(arguments: list[str]) -> int:
    """Predict every case, print the tables, write what is asked for; returns the exit code."""
    options = tyro.cli(SimulateOptions, args=arguments, prog="gossipgrad simulate")
    check(options)
    profile = Profile.load(options.profile)
    cases = simulate(options, profile)
    console = Console()
    console.print(
        f"{profile.name} on {profile.device}: {seconds_text(profile.compute_seconds)} of compute a "
        f"step, {profile.size_bytes / 1e6:.4g} MB of parameters",
        soft_wrap=True,
        highlight=False,
    )
    for network in dict.fromkeys(case.network for case in cases):
        console.print(table(network, [case for case in cases if case.network == network]))
    console.print(_NOTE, soft_wrap=True, highlight=False)
    batches = {c.prediction.world_size: c.batch_to_accuracy for c in cases if c.batch_to_accuracy}
    if batches:
        told = ", ".join(f"{batch} at {p:,} ranks" for p, batch in batches.items())
        console.print(
            f"Times to accuracy are of steps of the curves' batch a rank ({told}) in place of the "
            f"profile's {profile.batch_size}, compute in proportion.",
            soft_wrap=True,
            highlight=False,
        )
    for line in _untold(cases, options):
        console.print(line, soft_wrap=True, highlight=False)
    if options.out is not None:
        figures = {
            "options": {name: _plain(value) for name, value in asdict(options).items()},
            "compute_seconds": profile.compute_seconds,
            "size_bytes": profile.size_bytes,
            "cells": [case.to_json() for case in cases],
        }
        try:
            options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write --out {options.out}: {error.strerror}") from error
        console.print(f"figures {options.out}", soft_wrap=True, highlight=False)
    if options.figure is not None:
        from ._simulate_figure import draw

        draw(cases, profile, options.figure)
        console.print(f"figure {options.figure}", soft_wrap=True, highlight=False)
    return 0


_NOTE = (
    "Step time, and the share of it that is compute. Predicted by a model of time: what it leaves "
    "out stands in its docs page, Predicting step times."
)


def _untold(cases: list[Case], options: SimulateOptions) -> list[str]:
    """Why strategies have no time to accuracy though curves were given; a line each."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for case in cases:
        if case.missing is not None:
            worlds = by_reason.setdefault((case.prediction.strategy, case.missing), [])
            if case.prediction.world_size not in worlds:
                worlds.append(case.prediction.world_size)
    return [
        f"No time to accuracy of {strategy} at {', '.join(f'{p:,}' for p in worlds)} "
        f"rank{'s' * (worlds != [1])}: {options.curves} has {missing}."
        for (strategy, missing), worlds in by_reason.items()
    ]


def table(title: str, cases: list[Case]) -> Table:
    """Strategies against numbers of ranks."""
    worlds = list(dict.fromkeys(case.prediction.world_size for case in cases))
    shown = Table(title=title, title_justify="left")
    shown.add_column()
    for p in worlds:
        shown.add_column(f"{p:,} rank{'s' * (p != 1)}", justify="right")
    for name in dict.fromkeys(case.prediction.strategy for case in cases):
        by_world = {c.prediction.world_size: c for c in cases if c.prediction.strategy == name}
        shown.add_row(name, *(_cell(by_world[p]) for p in worlds))
    return shown


def _cell(case: Case) -> str:
    efficiency = f"{100 * case.prediction.efficiency:.3g} %"
    lines = [f"{seconds_text(case.prediction.step_seconds)} {efficiency:>7}"]
    if case.target_accuracy is not None:
        reached = case.seconds_to_accuracy
        lines.append(
            f"{100 * case.target_accuracy:.4g} % "
            + ("not reached" if reached is None else f"in {seconds_text(reached)}")
        )
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
