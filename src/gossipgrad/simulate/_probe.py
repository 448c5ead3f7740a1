"""Measuring a network between live workers: exchanges by pair, all-reduce, copying and mixing."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad.comm import Channel, Group, Outcome, Part, Transport, ZeroMQTransport
from gossipgrad.errors import GossipError
from gossipgrad.planning import AffineCost
from gossipgrad.topology import complete

from ._network import Network

__all__ = ["SIZES_BYTES", "Measured", "Probe", "probe"]

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the messages that `probe` sends, unless it is told others."""

_MEMORY_BYTES = 32 << 20  # past any cache of a core
_MEMORY_REPEATS = 5
_SHARE_OF_EXCHANGES = 0.6  # of the time, all-reduce gets the rest
_FIRST_CHAIN, _LONGEST_CHAIN = 3, 16
_CHAINS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: what was measured, with how many bytes, and the median of its seconds.

    Attributes:
        what: `"exchange"` or `"all_reduce"`.
        ranks: The pair, or all.
        size_bytes: Of one message, or of the tensor that is reduced.
        seconds: Of one exchange, or one all-reduce.
    """

    what: str
    ranks: tuple[int, ...]
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What `probe` found, the same on all ranks.

    Attributes:
        network: The costs fitted to it; every pair that was measured is among its `links`.
        measured: The figures behind them.
        all_reduce: Cost of an all-reduce over all ranks.
    """

    network: Network
    measured: tuple[Measured, ...]
    all_reduce: AffineCost

    def to_json(self) -> dict[str, Any]:
        """What `Network.from_json` reads, and the figures beside it."""
        return {
            **self.network.to_json(),
            "all_reduce": {
                "alpha_seconds": self.all_reduce.alpha_seconds,
                "beta_seconds_per_byte": self.all_reduce.beta_seconds_per_byte,
            },
            "measured": [
                [one.what, list(one.ranks), one.size_bytes, one.seconds] for one in self.measured
            ],
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
        exchanges = _Exchanges(group, channel, timeout_seconds)
        measured = exchanges.measure(sizes_bytes, budget_seconds * _SHARE_OF_EXCHANGES)
    finally:
        channel.close(0.5)
    reduces = _measure_all_reduce(
        group, sizes_bytes, budget_seconds * (1 - _SHARE_OF_EXCHANGES), timeout_seconds
    )
    copying, mixing = _measure_memory()
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


class _Exchanges:
    """Chains of exchanges with one partner after another; rounds count on for all of them."""

    def __init__(self, group: Group, channel: Channel, timeout_seconds: float) -> None:
        self._group = group
        self._channel = channel
        self._timeout_seconds = timeout_seconds
        self._flats = [torch.zeros(part.numel, dtype=part.dtype) for part in channel.plan]
        self._round = 0

    def measure(self, sizes_bytes: tuple[int, ...], budget_seconds: float) -> list[Measured]:
        """The median of a few chains for each partner and size, as long as there is time."""
        schedule = complete(self._group.world_size, rotate=False)
        deadline = time.perf_counter() + budget_seconds
        found: list[Measured] = []
        for turn in range(schedule.period):
            partner = schedule.peers(turn, self._group.rank).send_to
            # All leave a share of the time to the partners to come, but meet the first two sizes.
            until = time.perf_counter() + (deadline - time.perf_counter()) / (
                schedule.period - turn
            )
            slowest: list[tuple[int, float]] = []
            for place, size in enumerate(sizes_bytes):
                length = self._chain_length(_expected(slowest, size), until)
                if place >= 2 and length == 0:
                    break
                length = max(1, length)
                mine = 0.0
                if partner is None:
                    self._round += _CHAINS * (1 + length)  # rounds count alike on all ranks
                else:
                    mine = median(self._chain(partner, place + 1, length) for _ in range(_CHAINS))
                    pair = min(partner, self._group.rank), max(partner, self._group.rank)
                    found.append(Measured("exchange", pair, size, mine))
                slowest.append((size, max(self._group.all_gather_object(mine))))
            if not self._all_have_time(deadline):
                break
        return found

    def _chain_length(self, expected_seconds: float | None, until: float) -> int:
        """How many exchanges of so many seconds fit, the same on all ranks; 0 for none."""
        if expected_seconds is None:
            return _FIRST_CHAIN
        left = max(self._group.all_gather_object(until - time.perf_counter()))
        return _fitting(expected_seconds, left)

    def _all_have_time(self, deadline: float) -> bool:
        return max(self._group.all_gather_object(deadline - time.perf_counter())) > 0

    def _chain(self, partner: int, bucket: int, length: int) -> float:
        """Seconds of one exchange in a chain, after a short one in which the two meet."""
        self._exchange(partner, 0)
        start = time.perf_counter()
        for _ in range(length):
            self._exchange(partner, bucket)
        return (time.perf_counter() - start) / length

    def _exchange(self, partner: int, bucket: int) -> None:
        exchange = self._channel.post(
            self._round, bucket, self._flats[bucket], send_to=partner, recv_from=partner
        )
        self._round += 1
        outcome = self._channel.take(exchange, self._timeout_seconds)
        if outcome is Outcome.LATE:
            raise GossipError(
                f"rank {partner} did not answer rank {self._group.rank} within "
                f"{self._timeout_seconds:g} s: is it running, and can messages reach it? A slow "
                "link needs a longer timeout_seconds"
            )
        if outcome is not Outcome.DELIVERED:
            raise GossipError(f"rank {partner} has died or left while it was measured")
        exchange.received = None


def _measure_all_reduce(
    group: Group, sizes_bytes: tuple[int, ...], budget_seconds: float, timeout_seconds: float
) -> list[Measured]:
    """All-reduces over Gloo one after another, as DistributedDataParallel has them."""
    prefix = dist.PrefixStore(f"probe/{group.broadcast_object(secrets.token_hex(8))}", group.store)
    # Rings of tens of seconds are ordinary on slow links: the timeout is for one of their hops.
    timeout = timedelta(seconds=timeout_seconds * group.world_size)
    found: list[Measured] = []
    everyone = tuple(range(group.world_size))
    deadline = time.perf_counter() + budget_seconds
    try:
        gloo: Any = dist.ProcessGroupGloo(prefix, group.rank, group.world_size, timeout)
        slowest: list[tuple[int, float]] = []
        for place, size in enumerate(sizes_bytes):
            expected = _expected(slowest, size)
            left = max(group.all_gather_object(deadline - time.perf_counter()))
            length = _FIRST_CHAIN if expected is None else _fitting(expected, left)
            if place >= 2 and length == 0:
                break
            length = max(1, length)
            flat = torch.zeros(size // 4)
            times = []
            for _ in range(_CHAINS + 1):  # the first makes connections
                gloo.allreduce([torch.zeros(1)]).wait()
                start = time.perf_counter()
                for _ in range(length):
                    gloo.allreduce([flat]).wait()
                times.append((time.perf_counter() - start) / length)
            seconds = median(group.all_gather_object(median(times[1:])))
            found.append(Measured("all_reduce", everyone, size, seconds))
            slowest.append((size, seconds))
    except RuntimeError as error:
        if isinstance(error, GossipError):
            raise
        first = str(error).split("\n", 1)[0]
        raise GossipError(
            f"an all-reduce did not come about: a rank is late, has died or left ({first})"
        ) from error
    return found


def _expected(slowest: list[tuple[int, float]], size_bytes: int) -> float | None:
    """What the next size will take, by the line through the last two; None before any."""
    if not slowest:
        return None
    (earlier, before), (latest, seconds) = (
        slowest[-2] if len(slowest) > 1 else (0, 0.0),
        slowest[-1],
    )
    slope = max(0.0, (seconds - before) / (latest - earlier))
    return seconds + slope * (size_bytes - latest)


def _fitting(expected_seconds: float, left_seconds: float) -> int:
    """The length of chains for which a quarter of the time is enough; 0 if none fits at all."""
    if expected_seconds * _CHAINS > left_seconds:
        return 0
    fitting = int(left_seconds / 4 / _CHAINS / max(expected_seconds, 1e-6))
    return max(1, min(_LONGEST_CHAIN, fitting))


def _measure_memory() -> tuple[float, float]:
    """Seconds a byte of copying a snapshot, and of mixing in what was received."""
    live, snapshot, received = (torch.zeros(_MEMORY_BYTES // 4) for _ in range(3))

    def copy() -> None:
        torch._foreach_copy_([snapshot], [live])

    def mix() -> None:
        delta = received - snapshot
        torch.dot(delta, delta)
        torch._foreach_add_([live], [delta], alpha=0.5)

    return _seconds(copy) / _MEMORY_BYTES, _seconds(mix) / _MEMORY_BYTES


def _seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_MEMORY_REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:])


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
    links: dict[tuple[int, int], AffineCost] = {}
    for pair in dict.fromkeys(one.ranks for one in exchanges):
        of_pair = [one for one in exchanges if one.ranks == pair]
        links[pair[0], pair[1]] = AffineCost.fit(
            [one.size_bytes for one in of_pair], [one.seconds for one in of_pair]
        )
    # The usual link: the median over pairs at each size, so that one bad link spoils nothing.
    sizes = sorted({one.size_bytes for one in exchanges})
    usual = [median(one.seconds for one in exchanges if one.size_bytes == n) for n in sizes]
    all_reduce = AffineCost.fit(
        [one.size_bytes for one in reduces], [one.seconds for one in reduces]
    )
    network = Network(
        exchange=AffineCost.fit(sizes, usual),
        hop=all_reduce.hop_of_ring(world_size),
        links=links,
        snapshot_seconds_per_byte=snapshot_seconds_per_byte,
        mix_seconds_per_byte=mix_seconds_per_byte,
        world_size=world_size,
    )
    return Probe(network, tuple(measured), all_reduce)


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
