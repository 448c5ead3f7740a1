"""The network that options of a command describe: a rate and a latency, or a measured file."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gossipgrad.planning import AffineCost
from gossipgrad.simulate import Network

from ._units import rate_of, rate_text, seconds_of

__all__ = ["for_ranks", "network_of"]


def network_of(
    bandwidth: str | None, latency: str | None, file: Path | None, world_size: int, *, what: str
) -> tuple[str, Network]:
    """The network for so many ranks, and what to call it.

    Args:
        bandwidth: Rate of each host's link; None: 1Gbit.
        latency: Of a message; None: 50us.
        file: What `gossipgrad probe` wrote, in place of both.
        world_size: The number of ranks.
        what: Is for so many, for a warning.

    Raises:
        ValueError: The options do not go together, or one is no rate, time or network.
    """
    if file is not None:
        if (bandwidth, latency) != (None, None):
            raise ValueError(
                "--network says what links cost: leave out --bandwidth and --latency, or --network"
            )
        network = for_ranks(Network.load(file), file, [world_size], what=what)[world_size]
        network.check(world_size)
        return str(file), network
    rate, latency = rate_of(bandwidth or "1Gbit"), latency or "50us"
    link = AffineCost.from_rate(rate_bits_per_second=rate, latency_seconds=seconds_of(latency))
    return f"{rate_text(rate)}, {latency}", Network(exchange=link)


def for_ranks(
    network: Network, path: Path, world_sizes: Sequence[int], *, what: str
) -> dict[int, Network]:
    """The network of each number of ranks.

    What was measured of single links, and of an all-reduce, is of the ranks that measured it. For
    another number it is left out, with a warning. A description that names no number of ranks holds
    for all.

    Args:
        network: What the file holds.
        path: Of the file, for the warning.
        world_sizes: The numbers of ranks.
        what: Is for these numbers, for the warning.
    """
    others = [p for p in world_sizes if network.world_size not in (None, p)]
    kinds = {
        "costs of single links": bool(network.links),
        "its all-reduce": network.all_reduce is not None,
    }
    left_out = [kind for kind, there in kinds.items() if there]
    if others and left_out:
        worlds = ", ".join(f"{p:,}" for p in others)
        are = "are" if network.links else "is"
        warnings.warn(
            f"--network {path} was measured with {network.world_size} ranks, and {what} is for "
            f"{worlds}: {' and '.join(left_out)} {are} left out there, what an exchange and a hop "
            "cost stays. Ask for as many ranks as were measured, or measure with as many",
            stacklevel=2,
        )
    return {p: replace(network, links={}) if p in others else network for p in world_sizes}
