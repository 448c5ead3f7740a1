"""The cases that `gossipgrad simulate` is asked for, each with its prediction."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

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

from ._simulate_options import SimulateOptions
from ._units import list_of, rate_of, rate_text, seconds_of

__all__ = ["Case", "simulate"]

_NARROW_BYTES = 2
_WITHIN = 0.005  # curves of few seeds tell no smaller difference


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
                    case = _with_accuracy(case, curves, _curve_of(strategy), options.accuracy)
                cases.append(case)
    return cases


def _curve_of(strategy: Strategy) -> str:
    """What curves call the strategy: how its accuracy differs, not its time."""
    if isinstance(strategy, Gossip):
        parts = ["gossip"]
        parts += ["sync"] * (strategy.mode == "sync")
        parts += [strategy.topology] * (strategy.topology != "dissemination")
        parts += ["bf16"] * (strategy.element_bytes == _NARROW_BYTES)
        return ", ".join(parts)
    if isinstance(strategy, AllReduce):  # by layers it is the same average
        return "allreduce, bf16" if strategy.element_bytes == _NARROW_BYTES else "allreduce"
    return strategy.name


def _with_accuracy(case: Case, curves: Curves, curve: str, accuracy: float | None) -> Case:
    found = case.prediction
    target, final = accuracy, curves.final("allreduce", found.world_size)
    if target is None and final is not None:
        target = final - _WITHIN
    if target is None or not curves.knows(curve, found.world_size):
        return case
    steps = curves.steps_to(curve, found.world_size, target)
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
