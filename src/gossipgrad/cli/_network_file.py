"""What the file of `--network` says about as many ranks as a command is asked for."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gossipgrad.simulate import Network

__all__ = ["for_ranks"]


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
