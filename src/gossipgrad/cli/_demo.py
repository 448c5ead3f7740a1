"""`gossipgrad demo`: the same run by gossip and by all-reduce, side by side."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from gossipgrad.trace import write_report
from gossipgrad.train import Outcome, TrainConfig, find_world, run

# Says that the runs beside it are of a demo, and may be replaced.
_MARKER = ".gossipgrad-demo"
_STRATEGIES: tuple[Literal["gossip", "allreduce"], ...] = ("gossip", "allreduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train on digits by gossip, then by all-reduce, and compare the two; half a minute."""

    nproc: int = 4
    """Processes to start on this machine."""
    epochs: int = 30
    """Passes over the training part."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""
    out: Path = Path("runs/demo")
    """Folder of the two runs and of a page that compares them; an earlier demo is replaced."""


def main(arguments: list[str]) -> int:
    """Run both, print the comparison; returns the exit code.

    Raises:
        ValueError: The world is given, and the demo could not start its own; or `out` holds runs of
            another command.
    """
    options = tyro.cli(DemoOptions, args=arguments, prog="gossipgrad demo")
    if (world := find_world(os.environ, nproc=options.nproc)) is not None:
        raise ValueError(
            f"the demo starts its own workers, and this is {world.found_by}. `gossipgrad train` "
            "takes part in such a world."
        )
    marker = options.out / _MARKER
    for strategy in _STRATEGIES:
        if (options.out / strategy).exists() and not marker.exists():
            raise ValueError(
                f"out is {options.out}, but its folder {strategy} is not of a demo, which would "
                "replace it; name another folder with --out."
            )
    options.out.mkdir(parents=True, exist_ok=True)
    marker.touch()
    config = TrainConfig(
        nproc=options.nproc,
        epochs=options.epochs,
        seed=options.seed,
        lr=0.2,
        overwrite=True,
    )
    console = Console()
    plural = "s" * (options.nproc != 1)
    outcomes: dict[str, Outcome] = {}
    for strategy in _STRATEGIES:
        console.print(f"[bold]{strategy}[/bold], {options.nproc} worker{plural} on digits")
        outcome = run(dataclasses.replace(config, strategy=strategy, out=options.out / strategy))
        if outcome.exit_code or outcome.summary is None:
            return outcome.exit_code
        outcomes[strategy] = outcome
    console.print(compare({name: outcome.summary for name, outcome in outcomes.items()}))
    console.print(_NOTE)
    for name, outcome in outcomes.items():
        console.print(f"{name}: {outcome.report}", soft_wrap=True, highlight=False)
    page = write_report(
        *(options.out / name for name in _STRATEGIES), out=options.out / "comparison.html"
    )
    console.print(f"side by side: {page}", soft_wrap=True, highlight=False)
    return 0


_ON_STEP = "communication_seconds_per_step"
_NOTE = (
    "Both on this machine, over loopback; gossipgrad advise predicts other links. Exposed is what "
    "a step waits for communication, slower ranks included. Communication on the step's thread is "
    "that and gossip's snapshots and mixing; all-reduce has its own thread, so only its waiting "
    "counts."
)
_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("accuracy", "accuracy", lambda value: f"{value:.2%}"),
    ("seconds", "seconds", lambda value: f"{value:.1f}"),
    ("samples/s", "samples_per_second", lambda value: f"{value:,.0f}"),
    ("step, ms", "step_seconds", lambda value: f"{value * 1e3:.2f}"),
    ("exposed a step, ms", "exposed_seconds_per_step", lambda value: f"{value * 1e3:.2f}"),
    ("communication on the step's thread, ms", _ON_STEP, lambda value: f"{value * 1e3:.2f}"),
    ("sent a step and rank, kB", "bytes_sent_per_step", lambda value: f"{value / 1e3:.1f}"),
    ("consensus distance", "consensus_distance", lambda value: f"{value:.2g}"),
)


def compare(summaries: dict[str, dict[str, Any] | None]) -> Table:
    """A table of the figures of several runs, a column each."""
    table = Table()
    table.add_column()
    for name in summaries:
        table.add_column(name, justify="right")
    for title, key, form in _ROWS:
        values = [_figure(summary or {}, key) for summary in summaries.values()]
        table.add_row(title, *("-" if value is None else form(value) for value in values))
    return table


def _figure(summary: dict[str, Any], key: str) -> Any:
    if key != _ON_STEP:
        return summary.get(key)
    waiting = summary.get("exposed_seconds_per_step")
    mixing = summary.get("mixing_seconds_per_step") or 0.0
    return None if waiting is None else waiting + mixing
