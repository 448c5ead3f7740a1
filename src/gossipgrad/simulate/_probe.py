"""Measuring a network between live workers, and the costs that follow."""

import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from gossipgrad.comm import Channel, Group, Part, Transport, ZeroMQTransport
from gossipgrad.planning import AffineCost, PiecewiseCost

from ._fitting import OUTWEIGHS, fit_exchange, fit_pair, fit_ring, shows_rate
from ._measuring import Exchanges, Measured, Points, measure_all_reduce, measure_memory
from ._network import Network

__all__ = ["SIZES_BYTES", "Probe", "check_sizes", "probe"]

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the messages that `probe` sends, by default."""

_NOISE, _MOST_NOISE = 0.1, 0.5
_DEVIATIONS = 4.5  # median absolute ones: three standard deviations of a normal distribution
_NAMES = {"exchange": "exchanges", "all_reduce": "all-reduces"}
_INSTEAD = {
    "exchange": "is taken to be no more than any message reached",
    "all_reduce": "is taken to be that of exchanges",
}
_SHARE_OF_EXCHANGES = 0.6  # of the time, all-reduce gets the rest


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe`, the same on all ranks.

    Attributes:
        network: The fitted costs. Pairs within a tenth of the usual one, or within the spread of
            all pairs, are taken to be like it; only others are among its `links`.
        pairs: Cost of each pair that was measured.
        all_reduce: Cost of an all-reduce over all ranks, as one line.
        measured: The figures that were fitted.
        untold: Of `"exchange"` and `"all_reduce"` those whose largest message was not much longer
            than its start-up, so that no rate follows from it. Exchanges then have no rate
            above that of any message, hops of all-reduce that of exchanges.
        left_out: Of either the sizes for which there was no time.
    """

    network: Network
    pairs: dict[tuple[int, int], AffineCost]
    all_reduce: AffineCost
    measured: tuple[Measured, ...]
    untold: tuple[str, ...] = ()
    left_out: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The network as `Network.from_json` reads it, and the figures beside it."""
        return self.network.to_json() | {
            "measured": [
                [one.what, list(one.ranks), one.size_bytes, one.seconds] for one in self.measured
            ],
            "untold": list(self.untold),
            "left_out": {what: list(sizes) for what, sizes in self.left_out.items()},
        }

    def doubts(self) -> list[str]:
        """A sentence on each thing that the figures do not show, and how to learn it."""
        doubts = []
        for what, name in _NAMES.items():
            sizes = self.left_out.get(what, ())
            listed = ", ".join(f"{size:,}" for size in sizes)
            if what in self.untold:
                longest = max(one.size_bytes for one in self.measured if one.what == what)
                more = f"more time ({listed} bytes were left out)" if sizes else "larger sizes"
                doubts.append(
                    f"{name} of up to {longest:,} bytes take less than {OUTWEIGHS} times their "
                    f"start-up and show no rate, which {_INSTEAD[what]}: give {more}"
                )
            elif sizes:
                doubts.append(f"there was no time for {name} of {listed} bytes")
        return doubts


def probe(
    group: Group,
    *,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    budget_seconds: float = 20.0,
    timeout_seconds: float = 30.0,
    transport: Callable[[Group], Transport] = ZeroMQTransport,
) -> Probe:
    """Measures the cost of exchanges and all-reduces between the workers of a group.

    A collective: all ranks call it alike. Pairs exchange equal messages as gossip does, all
    disjoint pairs at once: all sizes with two partners, then the smallest and a large one with
    others, until all pairs are measured or 0.6 of the time is over. The rest goes to ring
    all-reduces over Gloo. Each figure is the median of a few chains, in which an exchange begins
    when the one before it has arrived. torch's default group is not used.

    Where time is short, large messages are left out. Where the others are too short to show a
    rate, rank 0 warns, and the costs have no rate above that of any message.

    When a worker is late by `timeout_seconds` or dies, this raises on the others, and so does
    every later collective of `group`.

    Args:
        group: The workers, at least two; only its collectives and its store are used.
        sizes_bytes: Of the messages, rising, each a multiple of 4, at least two.
        budget_seconds: Roughly how long to measure.
        timeout_seconds: How long to wait for one message.
        transport: Moves the messages of exchanges, as in `gossipgrad.gossip`.

    Returns:
        The costs, equal on all ranks.

    Raises:
        ValueError: There is one worker, or the sizes or times are out of range.
        GossipError: A worker is late, or has died or left; the message names it where it is known.
    """
    _check(group.world_size, sizes_bytes, budget_seconds, timeout_seconds)
    try:
        found = _probe(group, sizes_bytes, budget_seconds, timeout_seconds, transport)
    except BaseException:
        group.close()  # the others must not wait for this one
        raise
    # Rings of many ranks are mostly start-up whatever the size: exchanges show their rate as well.
    lacking = "exchange" in found.untold or any(found.left_out[what] for what in found.untold)
    if lacking and group.rank == 0:
        warnings.warn(f"the network is not fully known: {'; '.join(found.doubts())}", stacklevel=2)
    return found


def _probe(
    group: Group,
    sizes_bytes: tuple[int, ...],
    budget_seconds: float,
    timeout_seconds: float,
    transport: Callable[[Group], Transport],
) -> Probe:
    run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
    plan = [Part(torch.float32, 1), *(Part(torch.float32, size // 4) for size in sizes_bytes)]
    channel = Channel(transport(group), run=run, plan=plan)
    try:
        exchanges = Exchanges(group, channel, timeout_seconds)
        measured = exchanges.measure(sizes_bytes, budget_seconds * _SHARE_OF_EXCHANGES)
    finally:
        channel.close(0.5)
    reduces = measure_all_reduce(
        group, sizes_bytes, budget_seconds * (1 - _SHARE_OF_EXCHANGES), timeout_seconds
    )
    figures = [(one.ranks, one.size_bytes, one.seconds) for one in measured]
    gathered, *memory = zip(*group.all_gather_object([figures, *measure_memory()]), strict=True)
    ends: dict[tuple[tuple[int, ...], int], list[float]] = {}  # both ends measure a pair
    for pair, size, seconds in (figure for figures in gathered for figure in figures):
        ends.setdefault((tuple(pair), size), []).append(seconds)
    pairs = [
        Measured("exchange", pair, size, sum(seconds) / len(seconds))
        for (pair, size), seconds in sorted(ends.items())
    ]
    return _fitted(group.world_size, sizes_bytes, pairs + reduces, *map(median, memory))


def _fitted(
    world_size: int,
    sizes_bytes: tuple[int, ...],
    measured: list[Measured],
    snapshot_seconds_per_byte: float,
    mix_seconds_per_byte: float,
) -> Probe:
    exchanges = [one for one in measured if one.what == "exchange"]
    by_pair: dict[tuple[int, int], Points] = {}
    for one in exchanges:
        by_pair.setdefault((one.ranks[0], one.ranks[1]), []).append((one.size_bytes, one.seconds))
    points = {
        "exchange": _usual(exchanges),
        "all_reduce": [(m.size_bytes, m.seconds) for m in measured if m.what == "all_reduce"],
    }
    exchange = fit_exchange(points["exchange"], points["all_reduce"], world_size)
    all_reduce = fit_ring(points["all_reduce"], world_size, exchange)
    pairs = {pair: fit_pair(of_pair, exchange) for pair, of_pair in by_pair.items()}
    sizes, seconds = zip(*points["all_reduce"], strict=True)
    network = Network(
        exchange=exchange,
        hop=all_reduce.hop_of_ring(world_size),
        all_reduce=PiecewiseCost.fit(sizes, seconds),
        links={pair: pairs[pair] for pair in _unlike(by_pair, points["exchange"])},
        snapshot_seconds_per_byte=snapshot_seconds_per_byte,
        mix_seconds_per_byte=mix_seconds_per_byte,
        world_size=world_size,
    )
    return Probe(
        network,
        pairs,
        all_reduce,
        tuple(measured),
        untold=tuple(what for what, of_kind in points.items() if not shows_rate(of_kind)),
        left_out={
            what: tuple(size for size in sizes_bytes if size not in dict(of_kind))
            for what, of_kind in points.items()
        },
    )


def _usual(exchanges: list[Measured]) -> Points:
    """The usual link: the median over pairs at each size, so that one bad link spoils nothing."""
    by_size: dict[int, list[float]] = {}
    for one in exchanges:
        by_size.setdefault(one.size_bytes, []).append(one.seconds)
    return [(size, median(seconds)) for size, seconds in sorted(by_size.items())]


def _unlike(by_pair: dict[tuple[int, int], Points], usual: Points) -> list[tuple[int, int]]:
    """Pairs with another kind of link, by their largest message if it shows a rate."""
    showing = {size for n, (size, _) in enumerate(usual) if n and shows_rate(usual[: n + 1])}
    deviations: dict[int, dict[tuple[int, int], float]] = {}
    for pair, of_pair in by_pair.items():
        size, seconds = max(of_pair)
        if size in showing:
            deviations.setdefault(size, {})[pair] = abs(seconds / dict(usual)[size] - 1)
    found = set()
    for of_size in deviations.values():
        # Where pairs differ much among each other, as on busy hosts, a tenth is noise.
        noise = min(_MOST_NOISE, max(_NOISE, _DEVIATIONS * median(of_size.values())))
        found |= {pair for pair, deviation in of_size.items() if deviation > noise}
    return [pair for pair in by_pair if pair in found]


def _check(
    world_size: int, sizes_bytes: tuple[int, ...], budget_seconds: float, timeout_seconds: float
) -> None:
    if world_size < 2:
        raise ValueError(
            "one worker has no link to measure: start two or more (gossipgrad probe --nproc 4, or "
            "inside torchrun or Slurm)"
        )
    check_sizes(sizes_bytes)
    if not budget_seconds > 0 or not timeout_seconds > 0:
        raise ValueError(
            f"budget {budget_seconds} s and timeout {timeout_seconds} s must be above 0"
        )


def check_sizes(sizes_bytes: tuple[int, ...]) -> None:
    """Raises unless messages of these sizes can be sent and a cost be fitted to them."""
    if len(sizes_bytes) < 2 or list(sizes_bytes) != sorted(set(sizes_bytes)):
        raise ValueError(f"sizes {sizes_bytes} must rise, and be two or more")
    if any(size < 4 or size % 4 for size in sizes_bytes):
        raise ValueError(f"sizes {sizes_bytes} must be multiples of 4 bytes, above 0")
