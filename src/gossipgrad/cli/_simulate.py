"""`gossipgrad simulate`: step time and efficiency at any scale, before anything is rented."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import (
    STRATEGIES,
    AllReduce,
    Curves,
    Gossip,
    Network,
    Prediction,
    Racks,
    Strategy,
    Workers,
    predict,
    strategy_by_name,
)

from ._units import list_of, rate_of, rate_text, seconds_of, seconds_text

_NARROW_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Predict step time and efficiency by strategy, number of ranks and bandwidth.

    Nothing is trained and nothing sent: all ranks are stepped through their schedule of computing,
    sending and waiting.
    """

    profile: str = "resnet50"
    """What a step computes: a profile that comes along (resnet50, googlenet, vgg16, gpt2), or a
    file that `gossipgrad profile` wrote."""
    world_size: str = "8,64,1024"
    """Numbers of ranks, with commas."""
    strategy: str = "all"
    """Names with commas, or all: gossip, gossip-sync, allreduce, agd, every-log-p, post-local-sgd,
    local."""
    bandwidth: str | None = None
    """Rates of each host's link, each way, with commas; None: 100Mbit,1Gbit,10Gbit."""
    latency: str | None = None
    """What an empty message takes; None: 50us."""
    network: Path | None = None
    """A file that `gossipgrad probe` wrote, in place of --bandwidth and --latency."""
    collective: Literal["ring", "halving"] = "ring"
    """How all-reduce goes: ring as Gloo does it, halving (recursive halving and doubling) as good
    MPI libraries do it for many ranks."""
    rack_size: int | None = None
    """Ranks behind one uplink; None: no links are shared."""
    uplink: str | None = None
    """Rate of an uplink, each way."""
    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] = (
        "dissemination"
    )
    """Who meets whom in gossip."""
    wire: Literal["float32", "bfloat16"] | None = None
    """Number type on the wire of gossip, allreduce and agd; None: that of the parameters."""
    jitter: float = 0.1
    """Spread of a step's compute from step to step, relative to itself."""
    straggler: float = 1.0
    """How many times longer the stragglers compute."""
    stragglers: int | None = None
    """How many there are; None: 1 if --straggler is given."""
    stall_probability: float = 0.0
    """Of a rank to stall in a step."""
    stall: str | None = None
    """How long a stall is, for example 1s."""
    seed: int = 0
    """Of jitter, stragglers, stalls and partners."""
    steps: int | None = None
    """Steps to go through; None: as many as take a second or so."""
    curves: Path | None = None
    """Accuracy by epoch of virtual ranks (the JSON of `python -m benchmarks.virtual_ranks`): gives
    the time to accuracy."""
    curves_model: str | None = None
    """Which model's curves; needed where there are several."""
    accuracy: float | None = None
    """The accuracy to reach, from 0 to 1; None: what allreduce ends with at as many ranks."""
    out: Path | None = None
    """Write the figures to this JSON file."""
    figure: Path | None = None
    """Draw efficiency over the number of ranks into this file (png, svg or pdf)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction, the network it is for, and what it means for accuracy."""

    network: str
    rate_bits_per_second: float | None
    prediction: Prediction
    seconds_to_accuracy: float | None = None
    target_accuracy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; the time to accuracy is None where it is not reached or not known."""
        found = self.prediction
        return {
            "network": self.network,
            "rate_bits_per_second": self.rate_bits_per_second,
            **asdict(found),
            "efficiency": found.efficiency,
            "exposed_seconds": found.exposed_seconds,
            "target_accuracy": self.target_accuracy,
            "seconds_to_accuracy": self.seconds_to_accuracy,
        }


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


def check(options: SimulateOptions) -> None:
    """Raise unless the options fit each other and what is to be written can be.

    Raises:
        ValueError: They do not.
    """
    if options.network is not None and (options.bandwidth, options.latency) != (None, None):
        raise ValueError(
            "--network says what links cost: leave out --bandwidth and --latency, or --network"
        )
    if (options.rack_size is None) != (options.uplink is None):
        raise ValueError("racks need both --rack-size and --uplink")
    if options.stragglers is not None and options.straggler == 1.0:
        raise ValueError(
            "--stragglers says how many, --straggler how much slower: give --straggler 2 for "
            "twice the time"
        )
    if (options.stall is None) != (options.stall_probability == 0.0):
        raise ValueError("stalls need both --stall and --stall-probability")
    if options.curves is None and (options.curves_model, options.accuracy) != (None, None):
        raise ValueError("--accuracy and --curves-model need --curves")
    if options.accuracy is not None and not 0 < options.accuracy <= 1:
        raise ValueError(
            f"accuracy is {options.accuracy}: it is a share, above 0 and at most 1 (0.87 is 87 %)"
        )
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.figure is not None:
        from ._simulate_figure import check as check_figure

        check_figure(options.figure)


def simulate(options: SimulateOptions, profile: Profile) -> list[Case]:
    """All cases that the options name.

    Raises:
        ValueError: One of the options does not fit.
    """
    worlds = _world_sizes(options.world_size)
    strategies = [_with_options(strategy, options) for strategy in _strategies(options.strategy)]
    workers = Workers(
        jitter=options.jitter,
        stragglers=(options.stragglers or 1) if options.straggler != 1.0 else 0,
        straggler_factor=options.straggler,
        stall_probability=options.stall_probability,
        stall_seconds=0.0 if options.stall is None else seconds_of(options.stall),
        seed=options.seed,
    )
    curves = None
    if options.curves is not None:
        curves = Curves.load(options.curves, model=options.curves_model)
    cases = []
    for name, rate, network in _networks(options):
        for p in worlds:
            here = network if p == network.world_size else replace(network, links={})
            for strategy in strategies:
                found = predict(
                    profile, here, strategy, world_size=p, workers=workers, steps=options.steps
                )
                case = Case(name, rate, found)
                if curves is not None:
                    case = _with_accuracy(case, curves, options.accuracy)
                cases.append(case)
    return cases


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


def _with_accuracy(case: Case, curves: Curves, accuracy: float | None) -> Case:
    found = case.prediction
    target = accuracy if accuracy is not None else curves.final("allreduce", found.world_size)
    if target is None or not curves.knows(found.strategy, found.world_size):
        return case
    steps = curves.steps_to(found.strategy, found.world_size, target)
    seconds = None if steps is None else steps * found.step_seconds
    return replace(case, target_accuracy=target, seconds_to_accuracy=seconds)


def _world_sizes(text: str) -> list[int]:
    worlds = []
    for part in list_of(text, "--world-size"):
        try:
            worlds.append(int(part.replace("_", "")))
        except ValueError:
            raise ValueError(
                f"{part!r} is no number of ranks: give whole numbers with commas, as 8,64"
            ) from None
    return list(dict.fromkeys(worlds))


def _strategies(text: str) -> list[Strategy]:
    names = list(STRATEGIES) if text == "all" else list_of(text, "--strategy")
    return [strategy_by_name(name) for name in dict.fromkeys(names)]


def _with_options(strategy: Strategy, options: SimulateOptions) -> Strategy:
    width = {None: None, "float32": 4, "bfloat16": _NARROW_BYTES}[options.wire]
    if isinstance(strategy, Gossip):
        return replace(strategy, topology=options.topology, element_bytes=width, seed=options.seed)
    if isinstance(strategy, AllReduce):
        return replace(strategy, element_bytes=width)
    return strategy


def _networks(options: SimulateOptions) -> list[tuple[str, float | None, Network]]:
    racks, behind = None, ""
    if options.rack_size is not None and options.uplink is not None:
        rate = rate_of(options.uplink)
        racks = Racks(size=options.rack_size, uplink_bits_per_second=rate)
        behind = f", racks of {options.rack_size} behind {rate_text(rate)}"
    if options.network is not None:
        network = replace(Network.load(options.network), racks=racks, collective=options.collective)
        rate = None if math.isinf(network.bytes_per_second) else 8 * network.bytes_per_second
        return [(f"{options.network}{behind}", rate, network)]
    latency = options.latency or "50us"
    networks: list[tuple[str, float | None, Network]] = []
    for text in list_of(options.bandwidth or "100Mbit,1Gbit,10Gbit", "--bandwidth"):
        rate = rate_of(text)
        cost = AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=seconds_of(latency))
        network = Network(exchange=cost, racks=racks, collective=options.collective)
        networks.append((f"{rate_text(rate)}, {latency}{behind}", rate, network))
    return networks


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
