"""`gossipgrad topology`: what a schedule does, before anything is trained with it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.table import Table

from gossipgrad.topology import Analysis, Schedule, analyse, by_name, mixing_product

from ._output import check_figure, new_figure, say, show, writing

_DRAWN_UP_TO = 1024
_PERIODS_DRAWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyOptions:
    """Show who meets whom, how fast that mixes, and draw the mixing matrix."""

    world_size: int
    """The number of ranks."""
    schedule: Literal["dissemination", "hypercube", "matching", "complete", "ring"] = (
        "dissemination"
    )
    """Who meets whom."""
    seed: int = 0
    """Picks the relabellings."""
    rotate: bool = True
    """Relabel the ranks after each period; the ring is always shown as it stands."""
    rounds: int = 8
    """How many rounds of rank 0's partners to list."""
    weight: float = 0.5
    """How much of the difference to its partner a rank takes in one round."""
    max_rounds: int = 1000
    """Where to give up counting rounds until the ranks agree."""
    image: Path | None = None
    """Draw the mixing matrix of one round, one period and several into this PNG file."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ValueError(f"rounds {self.rounds} is negative: list 0 or more")
        if self.max_rounds < 1:
            raise ValueError(
                f"max-rounds {self.max_rounds} leaves nothing to count: give 1 or more"
            )
        if self.image is not None and self.world_size > _DRAWN_UP_TO:
            raise ValueError(
                f"a mixing matrix of {self.world_size} ranks is too large to draw: "
                f"take a world size up to {_DRAWN_UP_TO}, or leave out --image"
            )


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    return run(tyro.cli(TopologyOptions, args=arguments, prog="gossipgrad topology"))


def run(options: TopologyOptions) -> int:
    """Print the properties of the schedule that the options name, and draw it if asked.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: The options do not fit, or the image cannot be drawn.
    """
    check_figure("--image", options.image, None)
    schedule = by_name(
        options.schedule,
        options.world_size,
        seed=options.seed,
        rotate=options.rotate and options.schedule != "ring",
    )
    analysis = analyse(schedule, weight=options.weight, max_rounds=options.max_rounds)
    if options.image is not None:
        _draw(schedule, options.weight, options.image)
    if options.json:
        print(json.dumps(_as_json(schedule, analysis, options), indent=2))
    else:
        _print_table(schedule, analysis, options)
    return 0


def _as_json(schedule: Schedule, analysis: Analysis, options: TopologyOptions) -> dict:
    return {
        "schedule": schedule.describe(),
        "symmetric": schedule.symmetric,
        "period": schedule.period,
        "weight": options.weight,
        "max_rounds": options.max_rounds,
        **asdict(analysis),
        "rank_0": [
            {"round": t, **schedule.peers(t, rank=0)._asdict()} for t in range(options.rounds)
        ],
        "image": None if options.image is None else str(options.image),
    }


def _print_table(schedule: Schedule, analysis: Analysis, options: TopologyOptions) -> None:
    def rounds(found: int | None) -> str:
        return f"more than {options.max_rounds:,}" if found is None else f"{about}{found:,}"

    about = "" if analysis.exact else "about "
    relabelled = schedule.describe()["rotate"]
    table = Table(show_header=False, title=_title(schedule))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("partners", "symmetric" if schedule.symmetric else "directed")
    table.add_row("period", f"{schedule.period:,} round{'s' * (schedule.period != 1)}")
    table.add_row(
        "after a period", f"new labels, seed {options.seed}" if relabelled else "the same again"
    )
    table.add_row("doubly stochastic", "yes" if analysis.doubly_stochastic else "no")
    table.add_row(
        "spectral gap of a period",
        f"{'' if analysis.exact else 'at most '}{analysis.spectral_gap:.4f}",
    )
    table.add_row("rounds to contract 10x", rounds(analysis.rounds_to_contract_10x))
    table.add_row("rounds to contract 1000x", rounds(analysis.rounds_to_contract_1000x))
    table.add_row("rounds until all know all", rounds(analysis.rounds_until_all_know_all))
    if options.rounds:
        table.add_section()
    for t in range(options.rounds):
        table.add_row(f"rank 0 in round {t}", _meeting(schedule, t))
    show(table)
    if not analysis.exact:
        say("Estimates, from random vectors and a sample of the ranks.")
    if options.image is not None:
        say(f"Drawn into {options.image}")


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}, {schedule.world_size:,} rank{'s' * (schedule.world_size != 1)}"


def _meeting(schedule: Schedule, round: int) -> str:
    send_to, recv_from = schedule.peers(round, rank=0)
    if send_to is None:
        return "sits out"
    if send_to == recv_from:
        return f"meets {send_to}"
    return f"sends to {send_to}, receives from {recv_from}"


def _draw(schedule: Schedule, weight: float, path: Path) -> None:
    several = _PERIODS_DRAWN * schedule.period
    panels = {
        "round 0": 1,
        f"one period ({schedule.period} rounds)": schedule.period,
        f"{_PERIODS_DRAWN} periods ({several} rounds)": several,
    }
    figure = new_figure(f"{_title(schedule)}: share of each rank's value", (13, 4.6))
    for axes, (title, rounds) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        product = mixing_product(schedule, rounds, weight=weight)
        image = axes.imshow(product, cmap="viridis", vmin=0.0, interpolation="nearest")
        axes.set(title=title, xlabel="comes from rank", ylabel="held by rank")
        figure.colorbar(image, ax=axes, shrink=0.8)
    with writing("--image", path):
        figure.savefig(path, format="png", dpi=120)
