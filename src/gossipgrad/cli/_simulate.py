"""`gossipgrad simulate`: step time and efficiency at any scale, before anything is rented."""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import (
    STRATEGIES,
    AllReduce,
    Gossip,
    Network,
    Prediction,
    Racks,
    Strategy,
    Suda,
    Workers,
    predict,
    strategy_by_name,
)

from ._network import for_ranks
from ._output import (
    check_figure,
    check_folder,
    new_figure,
    new_table,
    parse,
    say,
    show,
    write_json,
    writing,
)
from ._units import list_of, rate_of, rate_text, seconds_of, seconds_text


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Predict step time and efficiency by strategy, number of ranks and bandwidth.

    Nothing is trained and nothing sent: all ranks are stepped through their schedule of computing,
    sending and waiting.
    """

    profile: str = "resnet50"
    """What a step computes: a profile of the library (resnet50, googlenet, vgg16, lstm, gpt2), or
    a file that `gossipgrad profile` wrote."""
    world_size: str = "8,64,1024"
    """Numbers of ranks, with commas."""
    strategy: str = "all"
    """Names with commas, or all: gossip, gossip-sync, gossip-stale, gossip-mask (a tenth of the
    weights a round), local-steps (a round in 32 steps), allreduce, agd, every-log-p,
    post-local-sgd, local, suda, and, at density 0.01, omgs, topk, lags, wfbp, mg-wfbp."""
    bandwidth: str | None = None
    """Rates of each host's link, each way, with commas; None: 100Mbit,1Gbit,10Gbit."""
    latency: str | None = None
    """What an empty message takes; None: 50us."""
    hop_latency: str | None = None
    """What an empty hop of a ring all-reduce takes, which wakes more threads; None: as
    --latency."""
    network: Path | None = None
    """A file that `gossipgrad probe` wrote, in place of --bandwidth and the latencies."""
    collective: Literal["ring", "halving"] | None = None
    """How all-reduce goes: ring as Gloo does it, halving (recursive halving and doubling) as good
    MPI libraries do it for many ranks; None: as --network says, else ring."""
    rack_size: int | None = None
    """Ranks behind one uplink; None: no links are shared."""
    uplink: str | None = None
    """Rate of an uplink, each way."""
    topology: Literal["dissemination", "hypercube", "matching", "ring", "complete"] = (
        "dissemination"
    )
    """Who meets whom in gossip and suda."""
    payload: str = "weights"
    """What gossip sends, with commas: weights, weights+state, or weights+state/4 for state in every
    fourth round (1 to 99)."""
    wire: str | None = None
    """Number types on the wire of gossip, suda, allreduce and agd, with commas: float32, bfloat16;
    None: that of the parameters."""
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
    out: Path | None = None
    """Write the figures to this JSON file."""
    figure: Path | None = None
    """Draw efficiency over the number of ranks into this file (png, svg or pdf)."""


def check(options: SimulateOptions) -> None:
    """Raise unless the options fit each other and what is to be written can be.

    Raises:
        ValueError: They do not.
    """
    links = (options.bandwidth, options.latency, options.hop_latency)
    if options.network is not None and links != (None, None, None):
        raise ValueError(
            "--network says what links cost: leave out --bandwidth, --latency and --hop-latency, "
            "or --network"
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
    check_folder("--out", options.out)
    check_figure("--figure", options.figure, _FORMATS)


_FORMATS = (".png", ".svg", ".pdf")
_MARKERS = "osD^vPX"
_NARROW_BYTES = 2
_WIDTHS = {"float32": 4, "bfloat16": _NARROW_BYTES}


def strategies(options: SimulateOptions) -> list[Strategy]:
    """One for each strategy, and of some for each payload and wire that fits.

    Raises:
        ValueError: There is none of such a name, payload or wire.
    """
    given = options.strategy
    names = list(STRATEGIES) if given == "all" else list_of(given, "--strategy", "gossip,allreduce")
    payloads = [
        _payload(text) for text in list_of(options.payload, "--payload", "weights,weights+state")
    ]
    widths = (
        [None]
        if options.wire is None
        else [_width(w) for w in list_of(options.wire, "--wire", "float32,bfloat16")]
    )
    found: list[Strategy] = []
    for strategy in map(strategy_by_name, dict.fromkeys(names)):
        if not isinstance(strategy, Gossip | Suda | AllReduce):
            found.append(strategy)
            continue
        # A shared mask has no state: all strategies are asked for, not this one with it.
        stateless = isinstance(strategy, Gossip) and given == "all" and strategy.density < 1
        for every, copies in dict.fromkeys(
            payloads if isinstance(strategy, Gossip) else [(0, None)]
        ):
            if every and stateless:
                continue
            for width in dict.fromkeys(widths):
                changes: dict[str, Any] = {
                    "name": strategy.name + _state(every, copies) + _wire(width),
                    "element_bytes": width,
                }
                if isinstance(strategy, Gossip):
                    changes |= {"state_every": every, "state_copies": copies}
                if not isinstance(strategy, AllReduce):
                    changes |= {"topology": _topology_of(strategy, options), "seed": options.seed}
                found.append(replace(strategy, **changes))
    return found


def _topology_of(strategy: Gossip | Suda, options: SimulateOptions) -> str:
    """The one that was asked for; mode stale needs symmetric pairs, and has its own default."""
    stale = isinstance(strategy, Gossip) and strategy.mode == "stale"
    if stale and options.topology == "dissemination":
        return strategy.topology
    return options.topology


def _state(every: int, copies: int | None) -> str:
    if every == 0:
        return ""
    if copies == 1:
        return ", momentum"
    return ", state" if every == 1 else f", state every {every}"


def _wire(width: int | None) -> str:
    return ", bf16" * (width == _NARROW_BYTES)


def _payload(text: str) -> tuple[int, int | None]:
    """Rounds between exchanges of state, 0 for none, and how many tensors of it if not all."""
    if text == "weights+momentum":
        return 1, 1
    match = re.fullmatch(r"weights(?:(\+state)(?:/([1-9]\d?))?)?", text)
    if match is None:
        raise ValueError(
            f"no payload {text!r} is modelled: choose weights, weights+momentum, "
            "weights+state or weights+state/4, "
            "which sends state in every fourth round (1 to 99)"
        )
    return (0 if match[1] is None else int(match[2] or 1)), None


def _width(text: str) -> int:
    if text not in _WIDTHS:
        raise ValueError(f"no wire {text!r}: choose {' or '.join(_WIDTHS)}")
    return _WIDTHS[text]


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction, and the network it is for."""

    network: str
    rate_bits_per_second: float | None
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "network": self.network,
            "rate_bits_per_second": self.rate_bits_per_second,
            **asdict(self.prediction),
            "efficiency": self.prediction.efficiency,
            "exposed_seconds": self.prediction.exposed_seconds,
        }


def simulate(options: SimulateOptions, profile: Profile) -> list[Case]:
    """All cases that the options name.

    Raises:
        ValueError: One of the options does not fit.
    """
    worlds = _world_sizes(options.world_size)
    chosen = strategies(options)
    stragglers = int(options.straggler != 1.0) if options.stragglers is None else options.stragglers
    workers = Workers(
        jitter=options.jitter,
        stragglers=stragglers,
        straggler_factor=options.straggler,
        stall_probability=options.stall_probability,
        stall_seconds=0.0 if options.stall is None else seconds_of(options.stall),
        seed=options.seed,
    )
    cases = []
    for name, rate, network in _networks(options):
        here = dict.fromkeys(worlds, network)
        if options.network is not None:
            here = for_ranks(network, options.network, worlds, what="the prediction")
        for p in worlds:
            for strategy in chosen:
                found = predict(
                    profile, here[p], strategy, world_size=p, workers=workers, steps=options.steps
                )
                cases.append(Case(name, rate, found))
    return cases


def _world_sizes(text: str) -> list[int]:
    worlds = []
    for part in list_of(text, "--world-size", "8,64"):
        try:
            worlds.append(int(part.replace("_", "")))
        except ValueError:
            raise ValueError(
                f"{part!r} is no number of ranks: give whole numbers with commas, as 8,64"
            ) from None
    return list(dict.fromkeys(worlds))


def _networks(options: SimulateOptions) -> list[tuple[str, float | None, Network]]:
    racks, behind = None, ""
    if options.rack_size is not None and options.uplink is not None:
        rate = rate_of(options.uplink)
        racks = Racks(size=options.rack_size, uplink_bits_per_second=rate)
        behind = f", racks of {options.rack_size} behind {rate_text(rate)}"
    if options.network is not None:
        network = Network.load(options.network)
        collective = options.collective or network.collective
        network = replace(network, racks=racks or network.racks, collective=collective)
        rate = None if math.isinf(network.bytes_per_second) else 8 * network.bytes_per_second
        return [(f"{options.network}{behind}", rate, network)]
    latency, collective = options.latency or "50us", options.collective or "ring"
    networks: list[tuple[str, float | None, Network]] = []
    for text in list_of(options.bandwidth or "100Mbit,1Gbit,10Gbit", "--bandwidth", "1Gbit,10Gbit"):
        rate = rate_of(text)
        cost, hop = (
            AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=seconds_of(each))
            for each in (latency, options.hop_latency or latency)
        )
        network = Network(exchange=cost, hop=hop, racks=racks, collective=collective)
        hops = "" if options.hop_latency is None else f", hops {options.hop_latency}"
        networks.append((f"{rate_text(rate)}, {latency}{hops}{behind}", rate, network))
    return networks


def main(arguments: list[str]) -> int:
    """Predict every case, print the tables, write what is asked for; returns the exit code."""
    options = parse(SimulateOptions, arguments, "simulate")
    check(options)
    profile = Profile.load(options.profile)
    cases = simulate(options, profile)
    say(
        f"{profile.name} on {profile.device}: {seconds_text(profile.compute_seconds)} of compute a "
        f"step, {profile.size_bytes / 1e6:.4g} MB of parameters"
    )
    for network in dict.fromkeys(case.network for case in cases):
        show(table(network, [case for case in cases if case.network == network]))
    say(_NOTE)
    if options.out is not None:
        figures = {
            "options": {name: _plain(value) for name, value in asdict(options).items()},
            "compute_seconds": profile.compute_seconds,
            "size_bytes": profile.size_bytes,
            "cells": [case.to_json() for case in cases],
        }
        write_json("--out", options.out, figures)
        say(f"figures {options.out}")
    if options.figure is not None:
        draw(cases, profile, options.figure)
        say(f"figure {options.figure}")
    return 0


_NOTE = (
    "Step time, and the share of it that is compute. Predicted by a model of time: what it leaves "
    "out is in docs/simulate.md."
)


def table(title: str, cases: list[Case]) -> Table:
    """Strategies against numbers of ranks."""
    worlds = list(dict.fromkeys(case.prediction.world_size for case in cases))
    shown = new_table("", *(f"{p:,} rank{'s' * (p != 1)}" for p in worlds), title=title)
    for name in dict.fromkeys(case.prediction.strategy for case in cases):
        by_world = {c.prediction.world_size: c for c in cases if c.prediction.strategy == name}
        shown.add_row(name, *(_cell(by_world[p]) for p in worlds))
    return shown


def _cell(case: Case) -> str:
    efficiency = f"{100 * case.prediction.efficiency:.3g} %"
    return f"{seconds_text(case.prediction.step_seconds)} {efficiency:>7}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def draw(cases: list[Case], profile: Profile, path: Path) -> None:
    """One panel a network, one line a strategy."""
    from matplotlib.ticker import PercentFormatter

    networks = list(dict.fromkeys(case.network for case in cases))
    title = f"{profile.name} on {profile.device}, predicted"
    figure = new_figure(title, (4.6 * len(networks), 4.4))
    panels = figure.subplots(1, len(networks), sharey="row", squeeze=False)[0]
    for panel, network in zip(panels, networks, strict=True):
        here = [case.prediction for case in cases if case.network == network]
        worlds = sorted({found.world_size for found in here})
        panel.set(title=network, xlabel="ranks", xscale="log", ylim=(0, 1.04))
        panel.set_xticks(worlds, [f"{p:,}" for p in worlds])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        for number, name in enumerate(dict.fromkeys(found.strategy for found in here)):
            line = sorted((p.world_size, p.efficiency) for p in here if p.strategy == name)
            style = {"marker": _MARKERS[number % len(_MARKERS)], "label": name}
            panel.plot(*zip(*line, strict=True), **style)
    panels[0].set_ylabel("efficiency: compute / step")
    panels[-1].legend(fontsize=8)
    with writing("--figure", path):
        figure.savefig(path, dpi=120)
