"""`gossipgrad demo`: the same run by gossip and by all-reduce over slow links, side by side."""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from gossipgrad import data
from gossipgrad.report import write_report
from gossipgrad.train import Outcome, TrainConfig, build_model, find_world, run

from ._output import parse, writing

# Says that the runs beside it are of a demo, and may be replaced.
_MARKER = ".gossipgrad-demo"
_MOST_EPOCHS = 10_000  # also one worker then takes no more steps than a script of faults may name
_STRATEGIES: tuple[Literal["gossip", "allreduce"], ...] = ("gossip", "allreduce")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Train on digits by gossip, then by all-reduce, over slow links, and compare the two."""

    nproc: int = 4
    """Processes to start on this machine."""
    epochs: int = 12
    """Passes over the training part."""
    mbit_per_second: float = 25.0
    """Speed of the links between the processes: each message waits for as long as its bytes would
    take."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""
    out: Path = Path("runs/demo")
    """Folder of the two runs and of a page that compares them; an earlier demo is replaced."""


def main(arguments: list[str]) -> int:
    """Run both, print the comparison; returns the exit code.

    Raises:
        ValueError: The world is given, and the demo could not start its own; an option is out of
            range; or `out` holds runs of another command.
    """
    options = parse(DemoOptions, arguments, "demo")
    if (world := find_world(os.environ, nproc=options.nproc)) is not None:
        raise ValueError(
            f"the demo starts its own workers, and this is {world.found_by}. `gossipgrad train` "
            "takes part in such a world."
        )
    if not (math.isfinite(options.mbit_per_second) and options.mbit_per_second > 0):
        raise ValueError(
            f"mbit_per_second is {options.mbit_per_second}, but must be above 0 and finite, such "
            "as 50."
        )
    if not 1 <= options.epochs <= _MOST_EPOCHS:
        raise ValueError(f"epochs is {options.epochs}, but must be from 1 to {_MOST_EPOCHS}.")
    marker = options.out / _MARKER
    for strategy in _STRATEGIES:
        if (options.out / strategy).exists() and not marker.exists():
            raise ValueError(
                f"out is {options.out}, but its folder {strategy} is not of a demo, which would "
                "replace it; name another folder with --out."
            )
    with writing("--out", options.out):
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
        sent_bytes = _sent_bytes(config, strategy)
        seconds = 8 * sent_bytes / (options.mbit_per_second * 1e6)
        console.print(
            f"[bold]{strategy}[/bold], {options.nproc} worker{plural} on digits, links of "
            f"{options.mbit_per_second:g} Mbit/s: the {sent_bytes / 1e3:.1f} kB of a step take "
            f"{seconds * 1e3:.1f} ms",
            highlight=False,
        )
        outcome = run(
            dataclasses.replace(
                config,
                strategy=strategy,
                out=options.out / strategy,
                options={strategy: {"faults": _delays(config, seconds)}},
            )
        )
        if outcome.exit_code or outcome.summary is None:
            return outcome.exit_code
        outcomes[strategy] = outcome
    summaries = {name: outcome.summary for name, outcome in outcomes.items()}
    console.print(compare(summaries))
    console.print(_NOTE)
    for name, outcome in outcomes.items():
        console.print(f"{name}: {outcome.report}", soft_wrap=True, highlight=False)
    page = write_report(
        *(options.out / name for name in _STRATEGIES), out=options.out / "comparison.html"
    )
    console.print(f"[bold]{_verdict(summaries)}[/bold]", soft_wrap=True, highlight=False)
    console.print(f"side by side: {page}", soft_wrap=True, highlight=False)
    return 0


def _sent_bytes(config: TrainConfig, strategy: str) -> float:
    """What a worker sends in a step: its weights, or its part of a ring all-reduce."""
    with torch.device("meta"):
        model = build_model(config.model, data.info(config.data))
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    workers = config.nproc or 1
    return size_bytes * (min(workers - 1, 1) if strategy == "gossip" else 2 * (1 - 1 / workers))


def _delays(config: TrainConfig, seconds: float) -> str:
    """A script that delays what each rank sends in each step of the run."""
    workers = config.nproc or 1
    a_pass = math.ceil(data.info(config.data).train_samples / workers / config.batch_size)
    last = config.epochs * a_pass
    return "; ".join(
        f"delay rank={rank} rounds=0-{last} seconds={seconds:.6f}" for rank in range(workers)
    )


def _verdict(summaries: dict[str, dict[str, Any] | None]) -> str:
    """What gossip gained and lost, in a line."""
    gossip, reduced = (summaries[name] or {} for name in _STRATEGIES)
    ratio = gossip["step_seconds"] / reduced["step_seconds"]
    points = 100 * (gossip["accuracy"] - reduced["accuracy"])
    return (
        f"gossip takes {ratio:.2f} of all-reduce's time a step, and its accuracy is "
        f"{abs(points):.2f} points {'higher' if points >= 0 else 'lower'}"
    )


_ON_STEP = "communication_seconds_per_step"
_NOTE = (
    "The links are simulated on this machine: what a rank sends in a step comes as late as a link "
    "of that speed would bring it, and a ring all-reduce waits for its bytes the same way, without "
    "the latency of its hops. Exposed is what a step waits for communication, slower ranks "
    "included."
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
