"""`gossipgrad advise`: which family, mode and payload to use, and what that costs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossipgrad.planning import Profile
from gossipgrad.simulate import Workers, advise

from ._network import network_of
from ._output import new_table, parse, say, show
from ._units import seconds_text


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
    options = parse(AdviseOptions, arguments, "advise")
    p = options.world_size
    _, network = network_of(
        options.bandwidth, options.latency, options.network, p, what="the advice"
    )
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
    table = new_table("settings", "step", "compute", "sent", "points lost")
    table.columns[0].overflow = "fold"
    for choice in found.choices:
        of = choice.prediction
        table.add_row(
            choice.settings,
            seconds_text(of.step_seconds),
            f"{of.efficiency:.0%}",
            f"{of.bytes_sent_per_step / 1e6:.3g} MB",
            "not measured" if choice.loss is None else f"{choice.loss:.1f}",
        )
    show(table)
    say(str(found))
    return 0
