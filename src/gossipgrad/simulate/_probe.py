"""Measuring a network between live workers, and the costs that follow."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from gossipgrad.comm import Channel, Group, Part, Transport, ZeroMQTransport
from gossipgrad.planning import AffineCost, PiecewiseCost

from ._measuring import Exchanges, Measured, measure_all_reduce, measure_memory
from ._network import Network

__all__ = ["SIZES_BYTES", "Probe", "check_sizes", "probe"]

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the messages that `probe` sends, unless it is told others."""

_NOISE = 0.1
_SHARE_OF_EXCHANGES = 0.6  # of the time, all-reduce gets the rest


@dataclass(frozen=True, slots=True)
class Probe:
    """What `probe` found, the same on all ranks.

    Attributes:
        network: The costs fitted to it. Pairs within a tenth of the usual one are taken to be like
            it; only others are among its `links`.
        pairs: Cost of each pair that was measured.
        all_reduce: Cost of an all-reduce over all ranks, as one line.
        measured: The figures behind them.
    """

    network: Network
    pairs: dict[tuple[int, int], AffineCost]
    all_reduce: AffineCost
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """What `Network.from_json` reads, and the figures beside it."""
        return self.network.to_json() | {
            "measured": [
                [one.what, list(one.ranks), one.size_bytes, one.seconds] for one in self.measured
            ]
        }


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
    disjoint pairs at once, then meet other partners until all have met or 0.6 of the time is over;
    the rest goes to ring all-reduces over Gloo. Each figure is the median of a few chains, in
    which an exchange begins when the one before it has come. Where time is short, large messages
    are left out. Nothing of torch's default group is touched.

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
        return _probe(group, sizes_bytes, budget_seconds, timeout_seconds, transport)
    except BaseException:
        group.close()  # the others must not wait for this one
        raise


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
    measured: list[Measured],
    *,
    snapshot_seconds_per_byte: float,
    mix_seconds_per_byte: float,
) -> Probe:
    exchanges = [one for one in measured if one.what == "exchange"]
    reduces = [one for one in measured if one.what == "all_reduce"]
    pairs: dict[tuple[int, int], AffineCost] = {}
    for ranks in dict.fromkeys(one.ranks for one in exchanges):
        of_pair = [one for one in exchanges if one.ranks == ranks]
        pairs[ranks[0], ranks[1]] = AffineCost.fit(
            [one.size_bytes for one in of_pair], [one.seconds for one in of_pair]
        )
    # The usual link: the median over pairs at each size, so that one bad link spoils nothing.
    sizes = sorted({one.size_bytes for one in exchanges})
    usual = [median(one.seconds for one in exchanges if one.size_bytes == n) for n in sizes]
    exchange = AffineCost.fit(sizes, usual)
    reduced = [one.size_bytes for one in reduces], [one.seconds for one in reduces]
    all_reduce = AffineCost.fit(*reduced)
    network = Network(
        exchange=exchange,
        hop=all_reduce.hop_of_ring(world_size),
        all_reduce=PiecewiseCost.fit(*reduced),
        links={
            pair: cost
            for pair, cost in pairs.items()
            if _differs(cost, exchange, [m for m in exchanges if m.ranks == pair])
        },
        snapshot_seconds_per_byte=snapshot_seconds_per_byte,
        mix_seconds_per_byte=mix_seconds_per_byte,
        world_size=world_size,
    )
    return Probe(network, pairs, all_reduce, tuple(measured))


def _differs(cost: AffineCost, usual: AffineCost, of_pair: list[Measured]) -> bool:
    """Whether a pair is another kind of link, by its largest message; the rest is noise."""
    largest = max(one.size_bytes for one in of_pair)
    return abs(cost(largest) / usual(largest) - 1) > _NOISE


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
