"""The cases that `gossipgrad simulate` is asked for, each with its prediction."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gossipgrad.planning import AffineCost, Profile
from gossipgrad.simulate import Curves, Network, Prediction, Racks, Workers, predict

from ._network_file import for_ranks
from ._simulate_options import SimulateOptions
from ._simulate_strategies import curve_of, strategies
from ._units import list_of, rate_of, rate_text, seconds_of

__all__ = ["Case", "simulate"]

_WITHIN = 0.005  # curves of few seeds tell no smaller difference


@dataclass(frozen=True, slots=True)
class Case:
    """A prediction, the network it is for, and what it means for accuracy.

    `batch_to_accuracy` is what a rank computes in each of the steps to `target_accuracy`: as many
    samples as the curves were made with, whatever the profile's own batch. `missing` says
    what curves that were given lack.
    """

    network: str
    rate_bits_per_second: float | None
    prediction: Prediction
    seconds_to_accuracy: float | None = None
    target_accuracy: float | None = None
    batch_to_accuracy: int | None = None
    missing: str | None = None

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
            "batch_to_accuracy": self.batch_to_accuracy,
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
    curves = None
    if options.curves is not None:
        curves = Curves.load(options.curves, model=options.curves_model)
    cases = []
    for name, rate, network in _networks(options):
        here = dict.fromkeys(worlds, network)
        if options.network is not None:
            here = for_ranks(network, options.network, worlds, what="the prediction")
        for p in worlds:
            for strategy in chosen:
                found = partial(
                    predict,
                    network=here[p],
                    strategy=strategy,
                    world_size=p,
                    workers=workers,
                    steps=options.steps,
                )
                case = Case(name, rate, found(profile))
                if curves is not None:
                    curve = curve_of(strategy)
                    case = _with_accuracy(case, curves, curve, options.accuracy, profile, found)
                cases.append(case)
    return cases


def _with_accuracy(
    case: Case,
    curves: Curves,
    curve: str,
    accuracy: float | None,
    profile: Profile,
    found: Callable[[Profile], Prediction],
) -> Case:
    p = case.prediction.world_size
    target, final = accuracy, curves.final("allreduce", p)
    if target is None and final is not None:
        target = final - _WITHIN
    if not curves.knows(curve, p):
        return replace(case, missing=f"no curve of {curve}")
    if target is None:
        lacks = "no curve of allreduce, whose end would be the accuracy to reach: give --accuracy"
        return replace(case, missing=lacks)
    batch, seconds = curves.batch_size(curve, p), None
    steps = curves.steps_to(curve, p, target)
    if steps is not None:
        # Steps of the curves are no steps of the profile: a rank's share of their batch is another.
        same = batch == profile.batch_size
        alike = case.prediction if same else found(profile.with_batch(batch))
        seconds = steps * alike.step_seconds
    return replace(
        case, target_accuracy=target, seconds_to_accuracy=seconds, batch_to_accuracy=batch
    )


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
