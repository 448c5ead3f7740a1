"""`gossipgrad advise`: which family, mode and payload to use, and what that costs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import Advice, Network, Workers, advise

from ._network_file import for_ranks
from ._units import rate_of, seconds_of, seconds_text


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviseOptions:
    """Recommend family, mode and payload for a model on a network.

    Nothing is trained and nothing sent. Step times are predicted, accuracy is that of measured runs
    of a small model: try the two best on your own.
    """

    profile: str = "resnet50"
    """What a step computes: a profile of the library (resnet50, googlenet, vgg16, lstm, gpt2), or
    a file that `gossipgrad profile` wrote."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """What trains the model: decides what gossip costs in accuracy."""
    world_size: int = 16
    """The number of ranks."""
    bandwidth: str | None = None
    """Rate of each host's link, each way; None: 1Gbit."""
    latency: str | None = None
    """What an empty message takes; None: 50us."""
    network: Path | None = None
    """A file that `gossipgrad probe` wrote, in place of --bandwidth and --latency."""
    most_loss: float = 0.5
    """Points of accuracy below all-reduce, after equal epochs, that are accepted."""
    jitter: float = 0.1
    """Spread of a step's compute from step to step, relative to itself."""
    json: bool = False
    """Print JSON instead of a table."""


def main(arguments: list[str]) -> int:
    """Predict, print the table and the advice; returns the exit code."""
    options = tyro.cli(AdviseOptions, args=arguments, prog="gossipgrad advise")
    p = options.world_size
    if options.network is not None:
        if (options.bandwidth, options.latency) != (None, None):
            raise ValueError(
                "--network says what links cost: leave out --bandwidth and --latency, or --network"
            )
        network = Network.load(options.network)
        network = for_ranks(network, options.network, [p], what="the advice")[p]
    else:
        link = AffineCost.from_rate(
            rate_bits_per_second=rate_of(options.bandwidth or "1Gbit"),
            latency_seconds=seconds_of(options.latency or "50us"),
        )
        network = Network(exchange=link)
    found = advise(
        Profile.load(options.profile),
        options.optimizer,
        network=network,
        world_size=p,
        most_loss=options.most_loss,
        workers=Workers(jitter=options.jitter),
    )
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    console = Console()
    console.print(_table(found))
    console.print(str(found), soft_wrap=True, highlight=False, markup=False)
    return 0


def _table(found: Advice) -> Table:
    shown = Table()
    shown.add_column("settings", overflow="fold")
    for name in ("step", "compute", "sent", "points lost"):
        shown.add_column(name, justify="right", no_wrap=True)
    for choice in found.choices:
        of = choice.prediction
        shown.add_row(
            choice.settings,
            seconds_text(of.step_seconds),
            f"{of.efficiency:.0%}",
            f"{of.bytes_sent_per_step / 1e6:.3g} MB",
            "not measured" if choice.loss is None else f"{choice.loss:.1f}",
        )
    return shown
