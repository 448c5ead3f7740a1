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

from ._fitting import OUTWEIGHS, fit_exchange, fit_pair, fit_ring, tells
from ._measuring import Exchanges, Measured, measure_all_reduce, measure_memory
from ._network import Network

__all__ = ["SIZES_BYTES", "Probe", "check_sizes", "probe"]

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the messages that `probe` sends, by default."""

_NOISE, _MOST_NOISE = 0.1, 0.5
_DEVIATIONS = 4.5  # median absolute ones: three standard deviations of what is normal
_NAMES = {"exchange": "exchanges", "all_reduce": "all-reduces"}
_INSTEAD = {
    "exchange": "is taken to be no more than any message reached",
    "all_reduce": "is taken to be that of exchanges",
}
_SHARE_OF_EXCHANGES = 0.6  # of the time, all-reduce gets the rest


Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Probe:
    """What `probe` found, the same on all ranks.

    Attributes:
        network: The costs fitted to it. Pairs within a tenth of the usual one, or within what
            pairs differ among each other, are taken to be like it; only others are among its
            `links`.
        pairs: Cost of each pair that was measured.
        all_reduce: Cost of an all-reduce over all ranks, as one line.
        measured: The figures behind them.
        untold: Of `"exchange"` and `"all_reduce"` those whose largest message was not much longer
            than its start-up, so that no rate follows from it. Exchanges then have no rate
            above what a message reached, hops of all-reduce that of exchanges.
        left_out: Of either the sizes for which there was no time.
    """

    network: Network
    pairs: dict[tuple[int, int], AffineCost]
    all_reduce: AffineCost
    measured: tuple[Measured, ...]
    untold: tuple[str, ...] = ()
    left_out: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `Network.from_json` reads, and the figures beside it."""
        return self.network.to_json() | {
            "measured": [
                [one.what, list(one.ranks), one.size_bytes, one.seconds] for one in self.measured
            ],
            "untold": list(self.untold),
            "left_out": {what: list(sizes) for what, sizes in self.left_out.items()},
        }

    def doubts(self) -> list[str]:
        """What the figures do not tell, a sentence each, and how to learn it."""
        said = []
        for what, name in _NAMES.items():
            sizes = self.left_out.get(what, ())
            listed = ", ".join(f"{size:,}" for size in sizes)
            if what in self.untold:
                longest = max(one.size_bytes for one in self.measured if one.what == what)
                said.append(
                    f"{name} of up to {longest:,} bytes take less than {OUTWEIGHS} times their "
                    f"start-up and tell no rate, which {_INSTEAD[what]}: give "
                    + (f"more time ({listed} bytes were left out)" if sizes else "larger sizes")
                )
            elif sizes:
                said.append(f"there was no time for {name} of {listed} bytes")
        return said


def probe(
    group: Group,
    *,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    budget_seconds: float = 20.0,
    timeout_seconds: float = 30.0,
    transport: Callable[[Group], Transport] = ZeroMQTransport,
) -> Probe:
    """Measures what exchanges and all-reduces cost between the workers of a group.

    A collective: all ranks call it alike. Pairs exchange equal messages as gossip does, all
    disjoint pairs at once: all sizes with two partners, then the smallest and a large one with
    others, until all have met or 0.6 of the time is over. The rest goes to ring all-reduces over
    Gloo. Each figure is the median of a few chains, in which an exchange begins when the one before
    it has come. Nothing of torch's default group is touched.

    Where time is short, large messages are left out. Where those that were sent are then too short
    to tell a rate from, rank 0 warns, and the costs have no rate above what a message reached.

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
    # Rings of many ranks are mostly start-up whatever the size: exchanges tell their rate as well.
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
    copying, mixing = measure_memory()
    everywhere = group.all_gather_object(
        [[[one.what, one.ranks, one.size_bytes, one.seconds] for one in measured], copying, mixing]
    )
    found = [Measured(w, tuple(r), n, s) for each, *_ in everywhere for w, r, n, s in each]
    return _fitted(
        group.world_size,
        sizes_bytes,
        _merged(found) + reduces,
        snapshot_seconds_per_byte=median(each[1] for each in everywhere),
        mix_seconds_per_byte=median(each[2] for each in everywhere),
    )


def _merged(found: list[Measured]) -> list[Measured]:
    """One figure a pair and size, of the two that its ends have."""
    ends: dict[tuple[tuple[int, ...], int], list[float]] = {}
    for one in found:
        ends.setdefault((one.ranks, one.size_bytes), []).append(one.seconds)
    return [
        Measured("exchange", pair, size, sum(seconds) / len(seconds))
        for (pair, size), seconds in sorted(ends.items())
    ]


def _fitted(
    world_size: int,
    sizes_bytes: tuple[int, ...],
    measured: list[Measured],
    *,
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
        untold=tuple(what for what, of_kind in points.items() if not tells(of_kind)),
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
    """Pairs of another kind of link, by their largest message if it tells; the rest is noise."""
    telling = {size for n, (size, _) in enumerate(usual) if n and tells(usual[: n + 1])}
    off: dict[int, dict[tuple[int, int], float]] = {}
    for pair, of_pair in by_pair.items():
        size, seconds = max(of_pair)
        if size in telling:
            off.setdefault(size, {})[pair] = abs(seconds / dict(usual)[size] - 1)
    found = set()
    for by_one in off.values():
        # Where pairs differ much among each other, as on busy hosts, a tenth tells nothing.
        noise = min(_MOST_NOISE, max(_NOISE, _DEVIATIONS * median(by_one.values())))
        found |= {pair for pair, apart in by_one.items() if apart > noise}
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
    """Raise unless messages of these sizes can be sent and a cost be fitted to them."""
    if len(sizes_bytes) < 2 or list(sizes_bytes) != sorted(set(sizes_bytes)):
        raise ValueError(f"sizes {sizes_bytes} must rise, and be two or more")
    if any(size < 4 or size % 4 for size in sizes_bytes):
        raise ValueError(f"sizes {sizes_bytes} must be multiples of 4 bytes, above 0")
